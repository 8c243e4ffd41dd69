"""Steps of rollouts by real engines, as many replicas as processes by tensor ranks: rank 0 prints
what a trainer would learn from.

    streaming_worker.py FOLDER TENSOR DELAYS

``DELAYS``: 1 where each rank works now and then for a while on something else.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_rl.data.loader import PromptLoader
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.loss import load_method
from megatron_rl.runtime import launch
from megatron_rl.runtime.display import Display
from megatron_rl.trainer.exchange import gathered_on_main
from megatron_rl.trainer.rollouts import Rollouts, Sampler
from megatron_rl.trainer.step_end import StepEnd
from megatron_rl.types import Completion, Prompt, Score
from tests.numerics import rollout_models as small

FOLDER, TENSOR, DELAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
WORLD = launch.start()


class Interrupted(VllmEngine):
    """Other requests of a replica are under way when something is begun or asked for; its ranks
    wait alike."""

    def poll(self) -> list[tuple[int, Completion]]:
        if DELAYS and self._draw.random() < 0.3:
            time.sleep(self._draw.random() / 20)
        return super().poll()


class OddLength:
    """Right where the number of tokens is odd; slower for long ones."""

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        lengths = [len(text.split()) for text in texts]
        if DELAYS:
            time.sleep(max(lengths) / 500)
        return [Score(float(length % 5), length % 2 == 1, {}) for length in lengths]


def step(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    experience = rollouts.collect(number)
    responses = experience.responses
    tokens = gathered_on_main(responses.tokens, responses, WORLD)
    if not WORLD.is_main:
        return None
    return {
        "uids": [prompt.uid for prompt in responses.prompts],
        "lengths": responses.lengths.tolist(),
        "rewards": [score.reward for score in responses.scores],
        "refused": experience.discarded_groups,
        "token_ids": sha256(tokens.columns["token_ids"].tobytes()).hexdigest(),
        "sampler_logprobs": sha256(tokens.columns["sampler_logprobs"].tobytes()).hexdigest(),
    }


def main() -> None:
    if WORLD.is_main:
        small.write("qwen3", 0, FOLDER / WORLD.launch_id)
    WORLD.barrier()
    config = small.engine_config(tensor=TENSOR, max_num_seqs=16)
    model = str(FOLDER / WORLD.launch_id / "qwen3_0")
    engine = Interrupted(model, config, seed=0, launch_id=WORLD.launch_id)
    engine._draw = random.Random(engine.replica)
    words = " ".join
    sampler = Sampler(
        engine, OddLength(), lambda ids: words(map(str, ids)), WORLD, Display(shown=False)
    )
    found = {}
    for method in ("grpo", "dapo"):
        rollouts = Rollouts(
            sampler=sampler,
            loader=PromptLoader(small.make_prompts(24), seed=1, shuffle=True),
            method=load_method(method),
            sampling=small.sampling(num_responses=2, stop_token_ids=tuple(range(3, 12))),
            prompts_per_step=8,
            seed=5,
            end=StepEnd(sampler.shown),
        )
        found[method] = [step(rollouts, number) for number in range(1, 4)]
    if WORLD.is_main:
        small.say(f"FOUND {json.dumps(found)}")
    small.run_cases({})


if __name__ == "__main__":
    main()
