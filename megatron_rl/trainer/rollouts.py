"""Prompts in, scored responses out: generation over the engine's replicas, rewards, dynamic
sampling with refills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.token_rows import RowNumbers
from megatron_rl.loss import Method
from megatron_rl.protocols import Reward, RolloutEngine
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.exchange import on_main, token_rows
from megatron_rl.trainer.experience import (
    Experience,
    Groups,
    Response,
    Responses,
    experience_of,
    joined,
)
from megatron_rl.trainer.hooks import RolloutEdit, edited_responses
from megatron_rl.trainer.metrics import Clock
from megatron_rl.trainer.ownership import sampling_ranks
from megatron_rl.types import Completion, Prompt, Sampling, Score

# Between scoring and credit: what of the groups of a step is changed (``trainer/hooks.py``). They
# are given on rank 0; the answer is equal on every rank.
AfterScoring = Callable[[int, Groups | None], RolloutEdit]
# Told some responses of a step, on rank 0.
LogSamples = Callable[[int, Sequence[Response]], None]


def not_logged(step: int, responses: Sequence[Response]) -> None:
    """The ``LogSamples`` of a run that logs none."""


@dataclass(frozen=True)
class Sampled:
    """Scored responses to each of some prompts, and the seconds that ``rollout`` and ``reward``
    took."""

    responses: Responses
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

    @property
    def _leaders(self) -> list[int]:
        """The first rank of each replica. Replicas are runs of world.size / num_replicas ranks, so
        these are the ranks that this divides."""
        world = self._world
        num_replicas = self._engine.num_replicas
        return [rank for rank in range(world.size) if rank * num_replicas % world.size == 0]

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Sampled:
        """Collective. ``sampling.num_responses`` scored responses for each prompt; tokens stay on
        the first rank of the replica that sampled them. ``what`` names this generation where its
        progress is shown."""
        clock = Clock()
        share = _share(prompts, self._engine.replica, self._engine.num_replicas)
        with clock("rollout"), self._display.phase(f"{what}: generating", announced=False):
            groups = self._generate(share, sampling, what)
            facts = self._facts(groups)
        with clock("reward"):
            scores = self._score(share, groups)
        group_ids = np.repeat(np.arange(len(prompts)), sampling.num_responses)
        assert len(facts) == len(scores) == len(group_ids), "every response that was asked for"
        holders = sampling_ranks([sampling.num_responses] * len(prompts), self._leaders)
        here = np.flatnonzero(holders == self._world.rank)
        completions = [completion for group in groups for completion in group]
        tokens = token_rows(0, [])
        if len(here):
            tokens = token_rows(int(here[0]), completions)
        responses = Responses(
            prompts=[prompts[group] for group in group_ids],
            group_ids=group_ids,
            lengths=facts[:, 0],
            truncated=facts[:, 1].astype(bool),
            weight_versions=facts[:, 2],
            scores=scores,
            tokens=tokens,
            holders=holders,
        )
        return Sampled(responses, clock.seconds)

    def shown(self, responses: Responses, rows: RowNumbers) -> list[Response] | None:
        """Collective: see ``exchange.on_main``."""
        return on_main(responses, rows, self._decode, self._world)

    def _generate(
        self, share: Sequence[Prompt], sampling: Sampling, what: str
    ) -> list[list[Completion]]:
        """Every replica answers a contiguous share of the prompts; all its ranks have the same
        completions."""
        if not share:
            return []
        progress = self._display.generating(what, len(share) * sampling.num_responses)
        return self._engine.generate(share, sampling, progress)

    def _facts(self, groups: Sequence[Sequence[Completion]]) -> Int[np.ndarray, "rows 3"]:
        """Collective: tokens, whether it is truncated and the version of the weights, of each
        completion of all ranks; the first rank of a replica tells."""
        told = []
        if self._world.rank in self._leaders:
            told = [
                (len(completion.token_ids), completion.truncated, completion.weight_version)
                for group in groups
                for completion in group
            ]
        by_rank = self._world.all_gather(np.array(told, dtype=np.int64).reshape(-1, 3))
        return np.concatenate(by_rank)

    def _score(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
    ) -> list[Score]:
        """Collective: the verdicts on all responses. The ranks of a replica judge a contiguous
        share each of what the replica sampled."""
        pairs = [
            (prompt, completion)
            for prompt, group in zip(prompts, groups, strict=True)
            for completion in group
        ]
        leader = self._leaders[self._engine.replica]
        num_ranks = self._world.size // self._engine.num_replicas
        share = _share(pairs, self._world.rank - leader, num_ranks)
        texts = [self._decode(list(completion.token_ids)) for _, completion in share]
        truncated = [completion.truncated for _, completion in share]
        scores = self._reward.score([prompt for prompt, _ in share], texts, truncated)
        return [score for scores in self._world.all_gather(scores) for score in scores]


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
    after_scoring: AfterScoring | None = None
    log_samples: LogSamples = not_logged
    num_samples: int = 0  # to log of a step

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
        kept: list[Responses] = []
        num_kept = discarded = tries = 0
        while num_kept < self.prompts_per_step and tries < self.method.needs.max_sampling_tries:
            latest = self._round(step, tries, self.prompts_per_step - num_kept, clock)
            tries += 1
            wanted = self._wanted(latest)
            discarded += latest.num_groups - wanted.num_groups
            num_kept += wanted.num_groups
            kept.append(wanted)
        if not num_kept:
            self._log(step, latest)
            raise ValueError(
                f"dynamic sampling: all {discarded} groups of step {step} were entirely right or"
                f" entirely wrong in {tries} rounds (samples.jsonl has some of the last); use"
                " easier or harder prompts, raise method.filters.dynamic_sampling.max_tries or"
                " switch it off (null)"
            )
        responses = joined(kept)
        metrics: Mapping[str, float] = {}
        if self.after_scoring is not None:
            with clock("reward"):
                everything = self.sampler.shown(responses, range(len(responses)))
                groups = None if everything is None else grouped(everything, responses)
                edit = self.after_scoring(step, groups)
                responses = edited_responses(responses, edit)
                metrics = edit.metrics
        self._log(step, responses)
        return replace(
            experience_of(responses),
            discarded_groups=discarded,
            tries=tries,
            hook_metrics=metrics,
            seconds=clock.seconds,
        )

    def _round(self, step: int, attempt: int, num_prompts: int, clock: Clock) -> Responses:
        prompts = self.loader.take(num_prompts)
        sampling = replace(self.sampling, seed=sampling_seed(self.seed, step, attempt))
        what = f"step {step}" if attempt == 0 else f"step {step}, round {attempt + 1}"
        sampled = self.sampler.run(prompts, sampling, what)
        clock.add(sampled.seconds)
        return sampled.responses

    def _wanted(self, responses: Responses) -> Responses:
        """Those of the groups that the method learns from."""
        correct = torch.tensor([score.correct for score in responses.scores])
        wants = self.method.wants_groups(correct, torch.from_numpy(responses.group_ids))
        return responses if wants.all() else responses.take(wants.nonzero().flatten().numpy())

    def _log(self, step: int, responses: Responses) -> None:
        """Collective."""
        if not self.num_samples:
            return
        rows = of_different_prompts([prompt.uid for prompt in responses.prompts], self.num_samples)
        shown = self.sampler.shown(responses, rows)
        if shown is not None:
            self.log_samples(step, shown)

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


def of_different_prompts(uids: Sequence[str], count: int) -> list[int]:
    """Row numbers: the first response of each of the first prompts; then the second of each, and so
    on. ``uids``: of the prompt of each row.

    Example: rows of prompts a a a b b b, ``count=3``: 0 3 1.
    """
    by_prompt: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        by_prompt.setdefault(uid, []).append(row)
    turns = zip_longest(*by_prompt.values())
    in_turn = [row for turn in turns for row in turn if row is not None]
    return in_turn[:count]


def grouped(everything: Sequence[Response], responses: Responses) -> Groups:
    """All of ``responses`` as they were made whole, by group."""
    groups: list[list[Response]] = [[] for _ in range(responses.num_groups)]
    for response, group in zip(everything, responses.group_ids.tolist(), strict=True):
        groups[group].append(response)
    return groups
