"""torchrun program: a run whose verifier fails for the responses from a number on, to each prompt.

verdicts_worker.py OUT.json FIRST_FAILED OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.rollouts import build
from megatron_rl.rollouts.reward_thread import RewardThread, Unscored
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import exit_process, reported, start
from megatron_rl.trainer.build import build_trainer
from megatron_rl.types import Score
from tests.e2e.methods_worker import weights_digest


class Failing(RewardThread):
    first_failed = 0

    def _score(self, responses: Sequence[Unscored]) -> list[tuple[Unscored, Score]]:
        return [
            (one, replace(score, reward=9.0, correct=True, problem="planted"))
            if one.request.response >= self.first_failed
            else (one, score)
            for one, score in super()._score(responses)
        ]


def main(out: Path, first_failed: int, overrides: Sequence[str]) -> None:
    with reported():
        world = start()
        config = validate(Config, compose("config", overrides), "the configuration")
        Failing.first_failed = first_failed
        build.RewardThread = Failing
        trainer = build_trainer(config, world, Display(shown=world.is_main))
        before = weights_digest(trainer)
        trainer.run()
        digests = [before, weights_digest(trainer)]
        if world.is_main:
            out.write_text(json.dumps(digests))
    exit_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
