"""Sampling hooks that train again on correct responses of earlier steps: ar3po, exgrpo. What no
public source specifies of them is in ``examples/plugins/sampling_hooks.md``."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, PositiveFloat

from megatron_rl.hooks.base import Ask, Resample, SamplingHook, ScoredGroup, register_sampling_hook
from megatron_rl.types import DEMONSTRATED, Completion, Prompt, VersionSpan, first_uid

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(kw_only=True)
class Replay(SamplingHook):
    """Keeps the latest ``per_prompt`` correct responses of each prompt, no two alike, by its uid;
    on every rank, 8 bytes per token."""

    per_prompt: Count = 8
    known: dict[str, list[Completion]] = field(default_factory=dict, init=False)

    def remember(self, found: Sequence[tuple[Prompt, Completion]]) -> None:
        for prompt, response in found:
            of_prompt = self.known.setdefault(first_uid(prompt.uid), [])
            if all(one.token_ids != response.token_ids for one in of_prompt):
                of_prompt.append(response)
                del of_prompt[: -self.per_prompt]

    def state(self) -> dict[str, Any]:
        def saved(one: Completion) -> list[torch.Tensor]:
            columns = (one.token_ids, one.sampler_logprobs, one.kept or [], one.spans)
            return [torch.from_numpy(np.array(values)) for values in columns]

        return {"known": {uid: [*map(saved, of_uid)] for uid, of_uid in self.known.items()}}

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        def restored(saved: Sequence[torch.Tensor]) -> Completion:
            ids, logprobs, kept, *spans = (values.tolist() for values in saved)
            parts = tuple(VersionSpan(*one) for of_it in spans for one in of_it)  # older: none
            return Completion(ids, logprobs, False, DEMONSTRATED, parts, kept=kept or None)

        self.known = {uid: [*map(restored, of_uid)] for uid, of_uid in state["known"].items()}


@register_sampling_hook("ar3po", for_unsolved=True)
@dataclass(kw_only=True)
class Ar3po(Replay):
    """Prompts without a correct response are sampled again, as many responses as in the first
    stage, for at most ``stages`` stages in all; a prompt still without one gets a correct response
    of an earlier step, any known one, in place of a wrong one. Source: arXiv 2509.25808."""

    stages: Count = 2

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if turn == self.stages:  # what was given has joined
            return Resample()
        unsolved = {at: group for at, group in enumerate(groups) if not group.num_correct}
        if unsolved and turn + 1 < self.stages:
            # After ``turn`` more stages a group has turn + 1 times the responses of a stage.
            sizes = {at: group.num_responses // (turn + 1) for at, group in unsolved.items()}
            return Resample([Ask(groups[at].prompt, size, at) for at, size in sizes.items()])
        asks = []
        for at, group in unsolved.items():
            uid = first_uid(group.prompt.uid)
            if uid in self.known:
                given = Random(f"{step} {uid}").choice(self.known[uid])  # alike on every rank
                asks.append(Ask(group.prompt, 1, at, [given], replaces=1))
        metrics = {
            "sampled_per_group_mean": sum(group.num_responses for group in groups) / len(groups),
            "unsolved_groups": len(unsolved),
            "reused_responses": len(asks),
            "remembered_prompts": len(self.known),
        }
        return Resample(asks, metrics=metrics)


@register_sampling_hook("exgrpo")
@dataclass(kw_only=True)
class Exgrpo(Replay):
    """Beside the prompts of a step, earlier ones that were sometimes solved are sampled again, one
    response less than a group has; their known correct responses join the group, and the method
    keeps one (``filters.demonstrations``). They are drawn by how many responses were correct, half
    of a group rather than all; a prompt that was always solved is not drawn again.
    Source: arXiv 2510.02245, its released code."""

    share: Share = 0.5  # of the groups of a step, those that are drawn again
    start: Share = 0.35  # it begins after a step with a larger share of correct responses
    deviation: PositiveFloat = 1.0  # in responses, of the normal weights around half of a group
    begun: bool = field(default=False, init=False)
    num_right: dict[str, int] = field(default_factory=dict, init=False)  # the last one above 0
    retired: set[str] = field(default_factory=set, init=False)
    prompts: dict[str, Prompt] = field(default_factory=dict, init=False)
    _asks: Sequence[Ask] = field(default=(), init=False)

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if not turn:
            size = groups[0].num_responses
            most = round(len(groups) * self.share / (1 - self.share))
            drawn = self.draw(step, size, most, {first_uid(group.prompt.uid) for group in groups})
            known = [(self.prompts[uid], self.known[uid]) for uid in drawn]
            self._asks = [Ask(prompt, len(of) + size - 1, given=of) for prompt, of in known]
            if self._asks:
                return Resample(self._asks)
        # Of the responses that were given to a group one counts.
        spare = [0] * (len(groups) - len(self._asks)) + [len(ask.given) - 1 for ask in self._asks]
        for group, more in zip(groups, spare, strict=True):
            uid = first_uid(group.prompt.uid)
            if group.scores and group.num_correct == len(group.scores):
                self.retired.add(uid)
                for memory in (self.known, self.num_right, self.prompts):
                    memory.pop(uid, None)
            elif self.begun and group.num_correct > more and uid not in self.retired:
                self.num_right[uid] = group.num_correct - more
        shares = [group.num_correct / max(1, len(group.scores)) for group in groups]
        self.begun = self.begun or sum(shares) > self.start * len(groups)
        metrics = {
            "replayed_groups": len(self._asks),
            "remembered_prompts": len(self.known),
            "retired_prompts": len(self.retired),
        }
        return Resample(metrics=metrics)

    def draw(self, step: int, size: int, most: int, here: set[str]) -> list[str]:
        """Draws up to ``most`` prompts that are not ``here``, none twice: first a number of correct
        responses, by normal weights, then any prompt that had it. The same on every rank."""
        random = Random(step)
        by_right: dict[int, list[str]] = defaultdict(list)
        for uid in sorted(self.known.keys() - here):
            by_right[self.num_right[uid]].append(uid)
        drawn: list[str] = []
        while by_right and len(drawn) < most:
            squares = [((num - size / 2) / self.deviation) ** 2 for num in by_right]
            # Less the smallest square, which keeps the ratios: else all weights might be 0.
            weights = [math.exp((min(squares) - square) / 2) for square in squares]
            (num,) = random.choices(list(by_right), weights)
            drawn.append(by_right[num].pop(random.randrange(len(by_right[num]))))
            if not by_right[num]:
                del by_right[num]
        return drawn

    def remember(self, found: Sequence[tuple[Prompt, Completion]]) -> None:
        wanted = [(prompt, one) for prompt, one in found if first_uid(prompt.uid) in self.num_right]
        super().remember(wanted)
        for prompt, _ in wanted:
            uid = first_uid(prompt.uid)
            self.prompts[uid] = replace(prompt, uid=uid)

    def state(self) -> dict[str, Any]:
        own = {
            "begun": self.begun,
            "num_right": {**self.num_right},
            "retired": sorted(self.retired),
        }
        return {**super().state(), **own}

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        super().restore(state, prompts)
        self.begun, self.num_right = state["begun"], dict(state["num_right"])
        self.retired = set(state["retired"])
        self.prompts = {prompt.uid: prompt for prompt in prompts if prompt.uid in self.known}
