"""Prompts in, scored responses out: generation over the engine's replicas, rewards, dynamic
sampling with refills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.loss import Method
from megatron_rl.protocols import Reward, RolloutEngine
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.exchange import flattened
from megatron_rl.trainer.experience import Experience, Groups, Response, experience_of
from megatron_rl.trainer.metrics import Clock
from megatron_rl.types import Completion, Prompt, Sampling

# Between scoring and credit: the groups that go on, and metrics (``trainer/hooks.py``).
AfterScoring = Callable[[int, Groups], tuple[Groups, dict[str, float]]]
# Told the responses of a step.
LogSamples = Callable[[int, Sequence[Response]], None]


def unchanged(step: int, groups: Groups) -> tuple[Groups, dict[str, float]]:
    """The ``AfterScoring`` of a run without rollout hooks."""
    return groups, {}


def not_logged(step: int, responses: Sequence[Response]) -> None:
    """The ``LogSamples`` of a run that logs none."""


@dataclass(frozen=True)
class Sampled:
    """Scored responses to each of some prompts, and the seconds that ``rollout`` and ``reward``
    took."""

    groups: list[list[Response]]
    seconds: Mapping[str, float]


class Sampler:
    """Generates and scores; the trainer and the evaluator share it."""

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        world: World,
        display: Display,
    ) -> None:
        self._engine = engine
        self._reward = reward
        self._decode = decode
        self._world = world
        self._display = display

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Sampled:
        """Collective. ``sampling.num_responses`` scored responses for each prompt, on every rank.
        ``what`` names this generation where its progress is shown."""
        clock = Clock()
        with clock("rollout"), self._display.phase(f"{what}: generating", announced=False):
            completions = self._generate(prompts, sampling, what)
        with clock("reward"):
            groups = self._score(prompts, completions)
        return Sampled(groups, clock.seconds)

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str
    ) -> list[list[Completion]]:
        """Every replica answers a contiguous share of the prompts."""
        engine = self._engine
        world = self._world
        share = _share(prompts, engine.replica, engine.num_replicas)
        progress = self._display.generating(what, len(share) * sampling.num_responses)
        completions = engine.generate(share, sampling, progress) if share else []
        # All ranks of a replica have the same completions; its first rank sends them. Replicas are
        # runs of world.size / num_replicas ranks, so that rank is the one that this divides.
        leads_replica = world.rank * engine.num_replicas % world.size == 0
        by_rank = world.all_gather(flattened(completions if leads_replica else []))
        return [group for flat in by_rank for group in flat.groups()]

    def _score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[list[Response]]:
        """Every rank scores a contiguous share of the responses."""
        pairs = [
            (prompt, completion)
            for prompt, group in zip(prompts, completions, strict=True)
            for completion in group
        ]
        share = _share(pairs, self._world.rank, self._world.size)
        texts = [self._decode(list(completion.token_ids)) for _, completion in share]
        truncated = [completion.truncated for _, completion in share]
        scores = self._reward.score([prompt for prompt, _ in share], texts, truncated)
        by_rank = self._world.all_gather(list(zip(texts, scores, strict=True)))
        judged = iter([row for rows in by_rank for row in rows])
        return [
            [Response(prompt, completion, *next(judged)) for completion in group]
            for prompt, group in zip(prompts, completions, strict=True)
        ]


def _share(items: Sequence, index: int, count: int) -> Sequence:
    """The share ``index`` of a contiguous split into ``count`` that differ by at most one item."""
    return items[len(items) * index // count : len(items) * (index + 1) // count]


@dataclass(frozen=True)
class Rollouts:
    """The responses of a step, by the newest weights: every rank samples, then every rank trains.

    ``sampling`` is that of a training step; its seed is replaced in every round of generation.
    """

    sampler: Sampler
    loader: PromptLoader | WeightedLoader
    method: Method
    sampling: Sampling
    prompts_per_step: int
    seed: int
    after_scoring: AfterScoring = unchanged
    log_samples: LogSamples = not_logged

    def collect(self, step: int) -> Experience:
        """The responses of one training step. Under dynamic sampling (DAPO, 2503.14476 eq 11)
        groups the method does not want are replaced by those of further prompts, for a bounded
        number of rounds; what was found by then is used.

        Some responses are logged, also when none was wanted: whatever stops the run in this step,
        they show what the policy answered.

        Raises:
            ValueError: no group was wanted, or a rollout hook failed.
        """
        clock = Clock()
        kept: list[list[Response]] = []
        latest: list[list[Response]] = []
        discarded = tries = 0
        while len(kept) < self.prompts_per_step and tries < self.method.needs.max_sampling_tries:
            latest = self._round(step, tries, self.prompts_per_step - len(kept), clock)
            tries += 1
            wanted = self._wanted(latest)
            discarded += len(latest) - len(wanted)
            kept += wanted
        if not kept:
            self.log_samples(step, [response for group in latest for response in group])
            raise ValueError(
                f"dynamic sampling: all {discarded} groups of step {step} were entirely right or"
                f" entirely wrong in {tries} rounds (samples.jsonl has some of the last); use"
                " easier or harder prompts, raise method.filters.dynamic_sampling.max_tries or"
                " switch it off (null)"
            )
        with clock("reward"):
            groups, metrics = self.after_scoring(step, kept)
        experience = experience_of(groups)
        self.log_samples(step, experience.responses)
        return replace(
            experience,
            discarded_groups=discarded,
            tries=tries,
            hook_metrics=metrics,
            seconds=clock.seconds,
        )

    def _round(
        self, step: int, attempt: int, num_prompts: int, clock: Clock
    ) -> list[list[Response]]:
        prompts = self.loader.take(num_prompts)
        sampling = replace(self.sampling, seed=sampling_seed(self.seed, step, attempt))
        what = f"step {step}" if attempt == 0 else f"step {step}, round {attempt + 1}"
        sampled = self.sampler.run(prompts, sampling, what)
        clock.add(sampled.seconds)
        return sampled.groups

    def _wanted(self, groups: list[list[Response]]) -> list[list[Response]]:
        """The groups that the method learns from."""
        sizes = torch.tensor([len(group) for group in groups])
        correct = torch.tensor([response.score.correct for group in groups for response in group])
        group_ids = torch.repeat_interleave(torch.arange(len(groups)), sizes)
        rows = self.method.wants_groups(correct, group_ids)
        first_rows = sizes.cumsum(0) - sizes
        wants = rows[first_rows].tolist()
        return [group for group, wanted in zip(groups, wants, strict=True) if wanted]

    def state(self) -> dict[str, Any]:
        """The position in the prompts."""
        return self.loader.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.loader.restore(state)


def sampling_seed(seed: int, step: int, attempt: int) -> int:
    """A distinct seed per generation round (32 bits); evaluation uses step 0 only."""
    return (seed * 1_000_003 + step * 1_009 + attempt) % 2**32


def rollout_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """How a training step samples."""
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
    """The same seed at every evaluation: two evaluations of the same weights give the same
    answers."""
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
    """Token ids that end a response, from ``eos_token_id`` of a tokenizer."""
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
