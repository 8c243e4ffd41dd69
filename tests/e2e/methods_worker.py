"""torchrun program: two training steps with each of several methods, on one policy and one engine.

methods_worker.py OUT.jsonl JSON OVERRIDE...

JSON: a list of methods, each as overrides of keys below ``method``: ["method=apo"].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.reading import Data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.loss.method import Method
from megatron_rl.rollouts.backends.colocated import ColocatedEngines
from megatron_rl.rollouts.demonstrations import Demonstrations, encoder
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.rollouts import Rollouts, step_rules
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.runtime.digest import combined_digest, tensor_digest
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import exit_process, reported, start
from megatron_rl.signals import SignalSetup, signals_of
from megatron_rl.trainer.build import build_trainer
from megatron_rl.trainer.trainer import Trainer


def weights_digest(trainer: Trainer) -> str:
    weights = trainer.learner.policy.gathered_weights()
    return combined_digest({name: tensor_digest(tensor) for name, tensor in weights})


def with_method(trainer: Trainer, config: Config) -> Trainer:
    """The same policy and engine, learning by the method of another configuration."""
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    source = trainer.source
    assert isinstance(source, Rollouts)
    # As the trainer of a method that trains on demonstrations is built.
    batch = config.batch
    has_demonstrations = "is_demonstration" in method.reads
    job = replace(
        source.job,
        rules=step_rules(method, batch.prompts_per_step, batch.responses_per_prompt),
        wants_group=method.wants_group,
        verdicts=VerdictRules(method.config.min_group, config.reward.max_excluded_share),
        stream=PromptStream(source.job.stream._loader),
        demonstrations=demonstrations_of(config) if has_demonstrations else None,
    )
    engines = source.engines
    assert isinstance(engines, ColocatedEngines)
    signals = signals_of(method, config.seed)
    folders = (Path(config.model.path), Path(config.run_dir))
    signals.prepare(Data((), (), ()), SignalSetup(*folders, None, trainer.world))
    plain = replace(job.plan.plain, num_likely=signals.num_likely)
    job = replace(job, plan=replace(job.plan, plain=plain))
    engines = ColocatedEngines(engines.backend, trainer.world, job, engines.colocation)
    source = replace(source, engines=engines, job=job)
    learner = replace(trainer.learner, method=method, signals=signals)
    return replace(trainer, source=source, learner=learner)


def demonstrations_of(config: Config) -> Demonstrations:
    return Demonstrations(encoder(load_tokenizer(config.model.path)))


def composed(overrides: Sequence[str]) -> Config:
    return validate(Config, compose("config", overrides), "the configuration")


def two_steps(trainer: Trainer, name: str, first_step: int) -> dict:
    before = weights_digest(trainer)
    metrics = [trainer.step(first_step), trainer.step(first_step + 1)]
    return {"method": name, "steps": metrics, "moved": before != weights_digest(trainer)}


def main(out: Path, methods: Sequence[str], overrides: Sequence[str]) -> None:
    with reported():
        world = start()
        trainer = build_trainer(composed(overrides), world, Display(shown=world.is_main))
        trainer.folder.resume(trainer.learner.policy, trainer.source)
        trainer.source.publish(0)
        rows = []
        for index, words in enumerate(methods):
            changed = with_method(trainer, composed([*overrides, *words.split()]))
            rows.append(two_steps(changed, words, 1 + 2 * index))
        if world.is_main:
            out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exit_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
