"""The sampling hooks of the package: vcrl, dars, erpo, ghpo, ampo.

``examples/plugins/sampling_hooks.md`` says what no public source specifies of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.hooks.base import Ask, Resample, SamplingHook, ScoredGroup, register_sampling_hook
from megatron_rl.types import GUIDES, HINTS, Prompt, first_uid

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0.01)]


def relative_variance(group: ScoredGroup) -> float:
    """p = s^2 / s^2_max of the verdicts, by the sample variance: k (G - k) over its largest value.

    Example: 1 of 4 is right: 3 / 4.
    """
    size = len(group.scores)
    half = size // 2
    return group.num_correct * (size - group.num_correct) / max(1, half * (size - half))


@register_sampling_hook("vcrl")
@dataclass(kw_only=True)
class Vcrl(SamplingHook):
    """Groups whose verdicts vary little leave the step; prompts whose verdicts varied much in
    earlier steps are sampled again in their place. Source: arXiv 2509.19803."""

    kappa: Share = 0.3
    later_kappa: Share = 0.8  # in the place of kappa from step ``later_from`` on
    later_from: Count = 20
    momentum: Share = 0.9
    capacity: Count = 1024
    # uid -> priority, prompt
    bank: dict[str, tuple[float, Prompt]] = field(default_factory=dict, init=False)
    _asked: set[str] = field(default_factory=set, init=False)

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if turn:
            again = [group for group in groups if group.prompt.uid in self._asked]
            self._note(again)
            mean = sum(map(relative_variance, again)) / len(again)
            return Resample(metrics={"replayed_variance_mean": mean})
        variances = [relative_variance(group) for group in groups]
        kappa = self.kappa if step < self.later_from else self.later_kappa
        keep = [variance >= kappa for variance in variances]
        here = {group.prompt.uid for group in groups}
        others = [(-priority, uid) for uid, (priority, _) in self.bank.items() if uid not in here]
        chosen = [uid for _, uid in sorted(others)[: keep.count(False)]]
        if not any(keep) and not chosen:  # a step has at least one group
            keep[variances.index(max(variances))] = True
        self._asked = set(chosen)
        self._note([group for group, kept in zip(groups, keep, strict=True) if kept])
        asks = [Ask(self.bank[uid][1], groups[0].num_responses) for uid in chosen]
        metrics = {
            "variance_mean": sum(variances) / len(variances),
            "refused_groups": keep.count(False),
            "replayed_groups": len(asks),
            "bank_prompts": len(self.bank),
        }
        return Resample(asks, keep, metrics)

    def _note(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            priority = relative_variance(group)
            uid = group.prompt.uid
            if uid in self.bank:
                priority = self.momentum * self.bank[uid][0] + (1 - self.momentum) * priority
            self.bank[uid] = (priority, group.prompt)
        for uid in sorted(self.bank, key=lambda uid: (-self.bank[uid][0], uid))[self.capacity :]:
            if uid not in self._asked:
                del self.bank[uid]

    def state(self) -> dict[str, Any]:
        return {"bank": {uid: priority for uid, (priority, _) in self.bank.items()}}

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        wanted = {first_uid(uid) for uid in state["bank"]} | state["bank"].keys()
        known = {prompt.uid: prompt for prompt in prompts if prompt.uid in wanted}
        self.bank = {}
        for uid, priority in state["bank"].items():
            prompt = known.get(uid) or known[first_uid(uid)]
            self.bank[uid] = (priority, replace(prompt, uid=uid))


@register_sampling_hook("dars")
@dataclass(kw_only=True)
class Dars(SamplingHook):
    """A second round for prompts of accuracy below 1/2, of as many responses as bring the group's
    sum of |A| to what ``schedule`` wants, at most ``max_responses`` in all; then the groups with
    right and wrong responses stay. Source: arXiv 2508.13755, its released code."""

    schedule: Literal["et", "hw"] = "et"
    max_responses: Count = 32

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if turn:
            return self._kept(groups, {})
        asks = []
        for number, group in enumerate(groups):
            more = second_round(group.num_correct, len(group.scores), self.schedule)
            more = min(more, self.max_responses - group.num_responses)
            if more > 0:
                asks.append(Ask(group.prompt, more, into=number))
        num_asked = sum(ask.num_responses for ask in asks)
        metrics = {"hard_groups": len(asks), "asked_responses": num_asked}
        return Resample(asks, metrics=metrics) if asks else self._kept(groups, metrics)

    def _kept(self, groups: Sequence[ScoredGroup], metrics: Mapping[str, float]) -> Resample:
        keep = [0 < group.num_correct < len(group.scores) for group in groups]
        dropped = keep.count(False)
        if not any(keep):  # a step has at least one group
            sizes = [len(group.scores) for group in groups]
            keep[sizes.index(max(sizes))] = True
        return Resample(keep=keep, metrics={**metrics, "dropped_groups": dropped})


def second_round(num_correct: int, size: int, schedule: str) -> int:
    """ceil((wanted - N S) / S): how many more responses a prompt of accuracy a gets after N.

    S = 2 a (1 - a), the mean of |r - mean|, with a at least 1 / 2N; wanted is N / 2, the most that
    N S can be, under et (equal treatment), and 2 (1 - a) N / 2 under hw (hardness weighted). 0
    where a >= 1/2.

    Example: 1 of 8: a = 1/8, S = 7/32, et (4 - 7/4) / S = 10.3, so 11.
    """
    if not size or 2 * num_correct >= size:
        return 0
    accuracy = max(Fraction(num_correct, size), Fraction(1, 2 * size))
    spread = 2 * accuracy * (1 - accuracy)
    wanted = Fraction(size, 2)
    if schedule == "hw":
        wanted *= 2 * (1 - accuracy)
    return math.ceil(wanted / spread - size)


@register_sampling_hook("erpo", changes_temperature=True)
@dataclass(kw_only=True)
class Erpo(SamplingHook):
    """A prompt whose responses were all right is sampled at a higher temperature when it comes
    again, by ``increase`` for each such visit in a row. Source: arXiv 2511.04800."""

    increase: Temperature = 0.1
    highest: Temperature = 1.5
    # By uid: how many visits in a row had correct responses only.
    visits: dict[str, int] = field(default_factory=dict, init=False)
    _refused: Sequence[ScoredGroup] = field(default=(), init=False)

    def temperature(self, prompt: Prompt, plain: float) -> float:
        return max(plain, min(self.highest, plain + self.visits.get(prompt.uid, 0) * self.increase))

    def observe(self, step: int, refused: Sequence[ScoredGroup]) -> None:
        """Under dynamic sampling these are the groups that were all right."""
        self._refused = refused

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        num_hot = sum(group.prompt.uid in self.visits for group in groups)
        num_residual = 0
        for group in (*groups, *self._refused):
            uid = group.prompt.uid
            if group.scores and group.num_correct == len(group.scores):
                self.visits[uid] = self.visits.get(uid, 0) + 1
                num_residual += 1
            else:
                self.visits.pop(uid, None)
        return Resample(metrics={"residual_groups": num_residual, "hot_groups": num_hot})

    def state(self) -> dict[str, Any]:
        return {"visits": dict(self.visits)}

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        self.visits = dict(state["visits"])


@register_sampling_hook("ampo", on_demand=True, for_unsolved=True)
@dataclass(kw_only=True)
class Ampo(SamplingHook):
    """A group that is all wrong is given the responses that its prompt brings along, of which the
    method keeps some (``filters.demonstrations``); ``replaces`` wrong ones, or as many as there are
    given ones, leave for them. Source: arXiv 2510.02227, its released code."""

    replaces: Count = 2

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if turn:  # what was given has joined
            return Resample()
        asks = []
        wrong = [at for at, each in enumerate(groups) if each.scores and not each.num_correct]
        for at in wrong:
            guides = groups[at].prompt.extra.get(GUIDES, ())
            if guides:
                leaving = min(self.replaces, len(guides))
                asks.append(Ask(groups[at].prompt, len(guides), at, guides, leaving))
        metrics = {"unsolved_groups": len(wrong), "guided_groups": len(asks)}
        return Resample(asks, metrics=metrics)


HINT = "hint_ratio"  # key in ``Prompt.extra``: how much of its solution the prompt shows


@register_sampling_hook("ghpo", for_unsolved=True)
@dataclass(kw_only=True)
class Ghpo(SamplingHook):
    """A group that is all wrong is replaced by a new one, of the prompt with a part of its
    solution, and that by one with the next larger part, until a response is correct. The group with
    the largest part stays even if all wrong. Source: arXiv 2507.10628, its released code."""

    from_step: Count = 1

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        # Without a verdict nothing is known of a group.
        wrong = [bool(group.scores) and not group.num_correct for group in groups]
        pairs = [*zip(groups, wrong, strict=True)] if step >= self.from_step else []
        again = [is_wrong and bool(group.prompt.extra.get(HINTS)) for group, is_wrong in pairs]
        asks = [
            Ask(with_next_hint(group.prompt), group.num_responses)
            for group, is_asked in zip(groups, again, strict=False)
            if is_asked
        ]
        metrics = {
            "hinted_groups": sum(HINT in group.prompt.extra for group in groups),
            "unsolved_groups": sum(wrong),
        }
        return Resample(asks, [not each for each in again] if asks else None, metrics)


def with_next_hint(prompt: Prompt) -> Prompt:
    """The next hinted form of a prompt, under a uid of its own, with the forms that follow it.

    Example: of ``a`` the ones with 0.25 and 0.5 are ``a+0.25`` and, of that, ``a+0.5``.
    """
    form, *more = prompt.extra[HINTS]
    ratio, token_ids, text = form["ratio"], form["token_ids"], form["text"]
    uid = prompt.uid.removesuffix(f"+{prompt.extra.get(HINT, 0):g}")
    extra = {**prompt.extra, HINTS: more, HINT: ratio}
    return replace(prompt, uid=f"{uid}+{ratio:g}", token_ids=token_ids, text=text, extra=extra)
