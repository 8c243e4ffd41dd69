"""torchrun program: two training steps with each of the methods named, on one policy and one engine.

    methods_worker.py OUT.jsonl METHOD[,METHOD...] OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.loss import load_method
from megatron_rl.runtime.digest import combined_digest, tensor_digest
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import leave, reported, start
from megatron_rl.trainer.build import build_trainer
from megatron_rl.trainer.rollouts import Rollouts
from megatron_rl.trainer.settings import rollout_sampling
from megatron_rl.trainer.trainer import Trainer


def weights_digest(trainer: Trainer) -> str:
    return combined_digest({name: tensor_digest(tensor) for name, tensor in trainer.parts.policy.gathered_weights()})


def two_steps(trainer: Trainer, config: Config, name: str, first_step: int) -> dict:
    method = load_method(name, response_limit=config.rollout.max_response_tokens)
    old = trainer.parts.rollouts
    batch = config.batch
    sizes = dict(prompts_per_step=batch.prompts_per_step, share_prompts=batch.share_prompts, seed=config.seed)
    rollouts = Rollouts(old._generator, old._loader, method, rollout_sampling(config, ()), **sizes)
    trainer = Trainer(replace(trainer.parts, method=method, rollouts=rollouts), trainer.schedule)
    before = weights_digest(trainer)
    metrics = [trainer.step(first_step), trainer.step(first_step + 1)]
    return {"method": name, "steps": metrics, "moved": before != weights_digest(trainer)}


def main(out: Path, names: Sequence[str], overrides: Sequence[str]) -> None:
    with reported():
        world = start()
        config = validate(Config, compose("config", overrides), "the configuration")
        trainer = build_trainer(config, world, Display(shown=world.is_main))
        trainer.parts.folder.resume(trainer.parts.policy, trainer.parts.rollouts)
        trainer.parts.hand_over.to_engine(0)
        rows = [two_steps(trainer, config, name, 1 + 2 * index) for index, name in enumerate(names)]
        if world.is_main:
            out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
