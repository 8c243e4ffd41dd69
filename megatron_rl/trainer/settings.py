"""What the parts of a trainer take from the configuration: schedule and sampling, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Config
from megatron_rl.trainer.rollouts import sampling_seed
from megatron_rl.types import Sampling


@dataclass(frozen=True)
class Schedule:
    """When things happen, and in what portions."""

    num_steps: int
    updates_per_rollout: int
    prompts_per_minibatch: int
    tokens_per_microbatch: int
    evaluate_every: int
    evaluate_at_start: bool
    evaluate_at_end: bool
    save_every: int
    save_best: bool
    export_every: int
    seed: int


def schedule(config: Config) -> Schedule:
    return Schedule(
        num_steps=config.trainer.num_steps,
        updates_per_rollout=config.trainer.updates_per_rollout,
        prompts_per_minibatch=config.batch.prompts_per_minibatch,
        tokens_per_microbatch=config.batch.tokens_per_microbatch,
        evaluate_every=config.evaluation.every_steps,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        save_every=config.checkpoint.every_steps,
        save_best=config.checkpoint.keep_best,
        export_every=config.checkpoint.export_every_steps,
        seed=config.seed,
    )


def rollout_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        num_responses=config.batch.responses_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
        stop=rollout.stop,
    )


def evaluation_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """The same seed at every evaluation: two evaluations of the same weights give the same answers."""
    evaluation = config.evaluation
    return Sampling(
        num_responses=evaluation.responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        seed=sampling_seed(config.seed, 0, 0),
        stop_token_ids=stop_ids,
        stop=config.rollout.stop,
    )


def stop_token_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
