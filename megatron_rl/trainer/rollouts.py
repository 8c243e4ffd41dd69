"""Prompts in, scored responses out: generation over the engine's replicas, rewards, dynamic sampling with refills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.loss import Method
from megatron_rl.protocols import Reward, RolloutEngine
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.exchange import flattened
from megatron_rl.types import Completion, Prompt, Sampling, Score, SequenceBatch


@dataclass(frozen=True)
class Response:
    """One completion with its text and verdict."""

    prompt: Prompt
    completion: Completion
    text: str
    score: Score


@dataclass(frozen=True)
class Experience:
    """One rollout phase: N responses in canonical (prompt, rollout) order, equal on every rank.

    ``discarded_groups`` counts the groups dynamic sampling threw away and ``tries`` its rounds of generation.
    """

    responses: Sequence[Response]
    sequences: SequenceBatch
    group_ids: Int[Tensor, " responses"]
    rewards: Float[Tensor, " responses"]
    correct: Bool[Tensor, " responses"]
    truncated: Bool[Tensor, " responses"]
    sampler_logprobs: Float[Tensor, " tokens"]
    discarded_groups: int
    tries: int
    hook_metrics: Mapping[str, float] = field(default_factory=dict)  # of rollout hooks


Groups = Sequence[Sequence[Response]]
# Between scoring and credit: the groups that go on, and metrics (``trainer/hooks.py``).
AfterScoring = Callable[[int, Groups], tuple[Groups, dict[str, float]]]


def unchanged(step: int, groups: Groups) -> tuple[Groups, dict[str, float]]:
    """The form of a run without rollout hooks."""
    return groups, {}


class NothingToLearn(ValueError):
    """No group of a step is of use. ``responses``: those of the last round, to look at."""

    def __init__(self, message: str, responses: Sequence[Response]) -> None:
        super().__init__(message)
        self.responses = responses


class Generator:
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

    def run(
        self, prompts: Sequence[Prompt], sampling: Sampling, clock: Callable, what: str
    ) -> list[list[Response]]:
        """``sampling.num_responses`` scored responses for each prompt, on every rank. ``what`` names
        this generation where its progress is shown."""
        with clock("rollout"), self._display.phase(f"{what}: generating", announced=False):
            completions = self._generate(prompts, sampling, what)
        with clock("reward"):
            return self._score(prompts, completions)

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> list[list[Completion]]:
        engine, world = self._engine, self._world
        mine = self._share(prompts, engine.replica, engine.num_replicas)
        progress = self._display.generating(what, len(mine) * sampling.num_responses)
        completions = engine.generate(mine, sampling, progress) if mine else []
        leads_replica = world.rank * engine.num_replicas % world.size == 0
        by_rank = world.all_gather(flattened(completions if leads_replica else []))
        return [group for part in by_rank for group in part.groups()]

    def _score(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[list[Response]]:
        """Every rank scores a contiguous share of the responses."""
        pairs = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
        share = self._share(pairs, self._world.rank, self._world.size)
        texts = [self._decode(list(completion.token_ids)) for _, completion in share]
        scores = self._reward.score([prompt for prompt, _ in share], texts, [completion.truncated for _, completion in share])
        gathered = [row for part in self._world.all_gather(list(zip(texts, scores, strict=True))) for row in part]
        rows = iter(gathered)
        return [
            [Response(prompt, completion, *next(rows)) for completion in group] for prompt, group in zip(prompts, completions, strict=True)
        ]

    @staticmethod
    def _share(items: Sequence, part: int, parts: int) -> Sequence:
        """Part ``part`` of a contiguous split into ``parts`` that differ by at most one item."""
        return items[len(items) * part // parts : len(items) * (part + 1) // parts]


class Rollouts:
    """The colocated form: every rank samples with the newest weights, then every rank trains."""

    def __init__(
        self,
        generator: Generator,
        loader: PromptLoader | WeightedLoader,
        method: Method,
        sampling: Sampling,
        *,
        prompts_per_step: int,
        share_prompts: bool,
        seed: int,
        after_scoring: AfterScoring = unchanged,
    ) -> None:
        self._after_scoring = after_scoring
        self._generator, self._loader, self._method, self._sampling = generator, loader, method, sampling
        self._prompts_per_step, self._share_prompts, self._seed = prompts_per_step, share_prompts, seed

    def collect(self, step: int, clock: Callable) -> Experience:
        """The responses of one training step. Under dynamic sampling (DAPO, 2503.14476 eq 11) groups the method does not want
        are replaced by those of further prompts, for a bounded number of rounds; what was found by then is used.

        Raises:
            NothingToLearn: no group was wanted.
            ValueError: a rollout hook failed.
        """
        kept: list[list[Response]] = []
        last: list[Response] = []
        discarded = tries = 0
        while len(kept) < self._prompts_per_step and tries < self._method.needs.max_sampling_tries:
            prompts = self._loader.take(self._prompts_per_step - len(kept))
            sampling = replace(self._sampling, seed=sampling_seed(self._seed, step, tries))
            what = f"step {step}" if tries == 0 else f"step {step}, round {tries + 1}"
            groups = self._generator.run(prompts, sampling, clock, what)
            last = [response for group in groups for response in group]
            tries += 1
            wanted = [group for group, keep in zip(groups, self._wanted(groups), strict=True) if keep]
            discarded += len(groups) - len(wanted)
            kept += wanted
        if not kept:
            raise NothingToLearn(
                f"dynamic sampling: all {discarded} groups of step {step} were entirely right or entirely wrong in {tries} rounds "
                "(samples.jsonl has some of the last); use easier or harder prompts, raise method.filters.dynamic_sampling.max_tries "
                "or switch it off (null)",
                last,
            )
        with clock("reward"):
            groups, metrics = self._after_scoring(step, kept)
        result = experience(groups, discarded, tries, self._share_prompts)
        return replace(result, hook_metrics=metrics)

    def _wanted(self, groups: Sequence[Sequence[Response]]) -> list[bool]:
        sizes = torch.tensor([len(group) for group in groups])
        correct = torch.tensor([response.score.correct for group in groups for response in group])
        rows = self._method.wants_groups(correct, torch.repeat_interleave(torch.arange(len(groups)), sizes))
        return rows[sizes.cumsum(0) - sizes].tolist()

    def state(self) -> dict:
        return self._loader.state()

    def restore(self, state: dict) -> None:
        self._loader.restore(state)


def sampling_seed(seed: int, step: int, attempt: int) -> int:
    """A seed of its own for every round of generation (32 bits; evaluation uses step 0 only)."""
    return (seed * 1_000_003 + step * 1_009 + attempt) % 2**32


def experience(groups: Sequence[Sequence[Response]], discarded_groups: int, tries: int, share_prompts: bool) -> Experience:
    """Flattens groups of responses into the two layouts of ``megatron_rl.types``. ``share_prompts``: the policy is told which rows
    have the same prompt."""
    responses = [response for group in groups for response in group]
    logprobs = [np.asarray(response.completion.sampler_logprobs, dtype=np.float32) for response in responses]
    pairs = [(response.prompt.token_ids, response.completion.token_ids) for response in responses]
    group_ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(group) for group in groups]))
    return Experience(
        responses=responses,
        sequences=sequence_batch(pairs, group_ids if share_prompts else None),
        group_ids=group_ids,
        rewards=torch.tensor([response.score.reward for response in responses], dtype=torch.float32),
        correct=torch.tensor([response.score.correct for response in responses]),
        truncated=torch.tensor([response.completion.truncated for response in responses]),
        sampler_logprobs=torch.from_numpy(np.concatenate(logprobs)),
        discarded_groups=discarded_groups,
        tries=tries,
    )
