"""Responses that the sampling hooks of a run request within a step (``hooks.base``)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.hooks.base import ROLLOUT_HOOKS, Ask, SamplingHook, ScoredGroup
from megatron_rl.knobs import Named
from megatron_rl.rollouts import demonstrations
from megatron_rl.rollouts.rows.exchange import spans_of
from megatron_rl.rollouts.rows.experience import ROW_ARRAYS, Responses
from megatron_rl.rollouts.rows.metrics import Clock
from megatron_rl.types import DEMONSTRATED, Completion, Prompt, Sampling

# Rounds of one hook in one step: a hook that asks more often does not come to an end.
_MOST_ROUNDS = 64


# Collective: answers prompts in the middle of a step, see ``Rollouts.run``.
Responder = Callable[[Sequence[Prompt], Sampling, str, Clock], Responses]
Gather = Callable[[Any], list[Any]]  # collective: what every rank has


class Resampled(NamedTuple):
    """``dropped_tokens``: those of groups and rows that hooks have dropped."""

    responses: Responses
    metrics: Mapping[str, float] = {}
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Resampling:
    """The sampling hooks of a run, perhaps none. ``prompts``: all that may be asked again."""

    hooks: Mapping[str, SamplingHook]
    prompts: Sequence[Prompt]

    def as_they_are(self) -> Resampling:
        """A snapshot: temperatures as the hooks choose them now, whatever they learn later."""
        warming = {
            name: deepcopy(hook)
            for name, hook in self.hooks.items()
            if type(hook).temperature is not SamplingHook.temperature
        }
        return replace(self, hooks=warming)

    def sampling_of(self, prompt: Prompt, plain: Sampling) -> Sampling:
        """How a prompt is sampled in the first place; ``plain``: without hooks."""
        temperature = plain.temperature
        for hook in self.hooks.values():
            temperature = hook.temperature(prompt, temperature)
        return replace(plain, temperature=temperature)

    def run(
        self,
        respond: Responder,
        step: int,
        sampling: Sampling,
        responses: Responses,
        clock: Clock,
        gather: Gather,
        refused: Sequence[ScoredGroup] = (),
    ) -> Resampled:
        """Collective: lets the hooks request and drop responses; without hooks nothing changes.
        ``sampling``: of the step, without what hooks change for single prompts; requests have the
        seeds after its own. ``refused``: groups that dynamic sampling refused.

        Raises:
            ValueError: a hook dropped every group, or asked without end.
        """
        metrics: dict[str, float] = {}
        dropped_tokens = 0
        num_asked = 0
        for name, hook in self.hooks.items():
            hook.observe(step, refused)
            for turn in range(_MOST_ROUNDS):
                wanted = hook.resample(step, turn, scored_groups(responses))
                metrics |= {f"hook/{name}/{key}": value for key, value in wanted.metrics.items()}
                num_groups = responses.num_groups
                if wanted.asks:
                    assert sampling.seed is not None, "a step of a run has one"
                    num_asked += 1
                    seed = (sampling.seed + num_asked) % 2**32
                    single = replace(sampling, num_responses=1, seed=seed)
                    singles, groups = _singles(wanted.asks, num_groups)
                    more = respond(singles, single, "asking again", clock)
                    prompts = [ask.prompt for ask in wanted.asks for _ in range(ask.num_responses)]
                    responses = merged(responses, replace(more, prompts=prompts), groups)
                keep = np.ones(responses.num_groups, dtype=bool)
                # ``keep`` is about the groups that the hook saw; those that it asked for stay.
                keep[:num_groups] = True if wanted.keep is None else wanted.keep
                rows = keep[responses.group_ids]
                rows[_replaced(responses, wanted.asks)] = False
                num_before = responses.num_sampled_tokens
                responses = responses.take(np.flatnonzero(rows))
                dropped_tokens += num_before - responses.num_sampled_tokens
                if not len(responses):
                    raise ValueError(f"rollout hook {name}: dropped every group of step {step}")
                if not wanted.asks:
                    break
            else:
                raise ValueError(f"rollout hook {name}: asked {_MOST_ROUNDS} times in step {step}")
            if type(hook).remember is not SamplingHook.remember:
                hook.remember(right_responses(responses, gather))
        return Resampled(responses, metrics, dropped_tokens)

    def state(self) -> dict[str, Any]:
        return {name: hook.state() for name, hook in self.hooks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A hook that has no saved state begins anew."""
        for name, hook in self.hooks.items():
            if name in state:
                hook.restore(state[name], self.prompts)


NO_RESAMPLING = Resampling({}, ())


def resampling_of(chosen: Mapping[str, Named], prompts: Sequence[Prompt]) -> Resampling:
    """The sampling hooks among ``chosen``, the hooks of a run."""
    hooks = {
        name: ROLLOUT_HOOKS[name].make(**piece.knobs)
        for name, piece in chosen.items()
        if ROLLOUT_HOOKS[name].resamples
    }
    return Resampling(hooks, prompts)


def _singles(
    asks: Sequence[Ask], num_groups: int
) -> tuple[list[Prompt], Int[np.ndarray, " responses"]]:
    """One prompt per response that is asked for, under a uid of its own, so that all of them are
    one generation; and the group that each joins. ``num_groups``: existing groups. A new group has
    the demonstrations of its prompt, unless some are given; one that grows has them already."""
    singles: list[Prompt] = []
    groups: list[int] = []
    next_group = num_groups
    for ask in asks:
        group = next_group if ask.into is None else ask.into
        next_group += ask.into is None
        for number in range(ask.num_responses):
            prompt = demonstrations.without_demonstrations(ask.prompt)
            if number < len(ask.given):
                prompt = demonstrations.given(prompt, ask.given[number : number + 1])
            elif ask.into is None and not ask.given:
                prompt = demonstrations.only(ask.prompt, number)
            singles.append(replace(prompt, uid=f"{prompt.uid}/{len(singles)}"))
            groups.append(group)
    return singles, np.array(groups)


def _replaced(responses: Responses, asks: Sequence[Ask]) -> list[int]:
    """The rows that the responses of ``asks`` replace: the last of their groups."""
    rows: list[int] = []
    for ask in asks:
        if ask.replaces:
            before = np.flatnonzero(responses.group_ids == ask.into)[: -ask.num_responses]
            judged = [row for row in before.tolist() if responses.scores[row].problem is None]
            rows += judged[-ask.replaces :]
    return rows


def right_responses(responses: Responses, gather: Gather) -> list[tuple[Prompt, Completion]]:
    """Collective: the sampled rows that are correct, in their order, as demonstrations, each with
    the logprobs and the kept tokens of its sampler."""
    tokens = responses.tokens
    names = [name for name in ("token_ids", "sampler_logprobs", "kept") if name in tokens.columns]
    flags = tokens.views("sampled") if "sampled" in tokens.columns else None
    mine = {}
    for at, (row, *columns) in enumerate(
        zip(tokens.rows.tolist(), *map(tokens.views, names), strict=True)
    ):
        if responses.scores[row].correct and not responses.is_demonstration[row]:
            ids, logprobs, *kept = [array(each.dtype.char, each.tobytes()) for each in columns]
            spans = () if flags is None else spans_of(flags[at], DEMONSTRATED)
            places = kept[0] if kept else None
            mine[row] = Completion(ids, logprobs, False, DEMONSTRATED, spans, kept=places)
    found = {row: one for of_rank in gather(mine) for row, one in of_rank.items()}
    return [(responses.prompts[row], found[row]) for row in sorted(found)]


def scored_groups(responses: Responses) -> list[ScoredGroup]:
    """The groups of a step with their scores, which every rank knows."""
    pairs = list(zip(responses.prompts, responses.scores, strict=True))
    groups = responses.by_group(pairs)
    return [ScoredGroup.of(group[0][0], [score for _, score in group]) for group in groups]


def merged(first: Responses, more: Responses, groups: Int[np.ndarray, " more"]) -> Responses:
    """Both, in canonical order. ``groups``: for each row of ``more`` the group that it joins, after
    the rows that are there.

    Example: groups 0 0 1 1 and two rows more for 0 and 2 are the groups 0 0 0 1 1 2.
    """

    def both(there: TokenRows, come: TokenRows) -> TokenRows:
        columns = there.columns
        return TokenRows(
            # The rows of ``more`` come after those of ``first`` until both are sorted by group.
            np.concatenate([there.rows, come.rows + len(first)]),
            np.concatenate([there.lengths, come.lengths]),
            {name: np.concatenate([columns[name], come.columns[name]]) for name in columns},
        )

    experts = first.experts
    if experts is not None:
        assert more.experts is not None, "sampled alike"
        experts = both(experts, more.experts)
    joining = replace(more, group_ids=groups)
    appended = [one.num_appended for one in (first, more) if one.num_appended is not None]
    together = Responses(
        prompts=[*first.prompts, *more.prompts],
        scores=[*first.scores, *more.scores],
        tokens=both(first.tokens, more.tokens),
        experts=experts,
        num_appended=np.concatenate(appended) if appended else None,
        **{
            name: np.concatenate([getattr(first, name), getattr(joining, name)])
            for name in ROW_ARRAYS
        },
    )
    ordered = together.take(np.argsort(together.group_ids, kind="stable"))
    rows = np.sort(ordered.tokens.rows)
    experts = ordered.experts
    return replace(
        ordered,
        tokens=ordered.tokens.take(rows),
        experts=None if experts is None else experts.take(rows),
    )
