"""Partial rollouts over several ranks: what is trained is what a plain computation says, token for
token, whatever the timing and the number of replicas; and so it is from a saved state on."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.sampling import sampling_seed
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Prompt, Sampling, Score
from tests.engines import Growing, Stepwise
from tests.ranks import call
from tests.rollout_sources import rollouts_of, training_job

# Fewer prompts than are open at a time: some are open twice.
PROMPTS = [Prompt(f"p{number}", (5, number), str(number % 3), "toy") for number in range(7)]
RULES = StepRules(groups_per_step=4, responses_per_group=3, groups_in_flight=8, max_age=2)
SAMPLING = Sampling(3, max_response_tokens=40)
SEED = 4
STEPS = 9
Step = list[dict[str, Any]]  # what is trained of each response


class FirstToken:
    """The reward follows from the first and the last token."""

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        ids = [[int(word) for word in text.split()] for text in texts]
        return [Score(each[0] + each[-1] / 1000, each[0] % 3 == 0, {}) for each in ids]


@dataclass
class PlainGroup:
    prompt: Prompt
    first_step: int
    tokens: list[list[tuple[int, float, int]]]  # id, logprob, version, by response
    ended: list[str] = field(default_factory=lambda: [""] * RULES.responses_per_group)


def rest(engine: Stepwise, group: PlainGroup, number: int, step: int) -> tuple[list, str]:
    """All that a response would get in a step that it may go on in to its end."""
    engine.weight_version = step - 1
    sampling = replace(SAMPLING, seed=sampling_seed(SEED, step))
    growing = Growing(group.prompt, sampling, number, [each[0] for each in group.tokens[number]])
    while not (why := engine.grow(growing)):
        pass
    return [(*each, step - 1) for each in growing.new], why


def plain(rules: StepRules, num_steps: int) -> list[Step]:
    """One response after the other, each to its end in every step; what is behind the level is
    dropped."""
    loader = PromptLoader(PROMPTS, seed=1, shuffle=True)
    engine = Stepwise()
    groups: list[PlainGroup] = []
    steps = []
    for step in range(1, num_steps + 1):
        while len(groups) < rules.groups_in_flight:
            (prompt,) = loader.take(1)
            names = [f"{prompt.uid}#{n}" if n > 1 else prompt.uid for n in range(1, 99)]
            taken = {group.prompt.uid for group in groups}
            uid = next(name for name in names if name not in taken)
            groups.append(PlainGroup(replace(prompt, uid=uid), step, [[], [], []]))
        more = {}
        for place, group in enumerate(groups):
            for number in range(rules.responses_per_group):
                is_open = not group.ended[number]
                more[place, number] = rest(engine, group, number, step) if is_open else ([], "")
        needs = [
            max(len(more[place, number][0]) for number in range(rules.responses_per_group))
            for place in range(len(groups))
        ]
        oldest = [
            need
            for need, group in zip(needs, groups, strict=True)
            if step - group.first_step == rules.max_age
        ]
        level = max(sorted(needs)[rules.groups_per_step - 1], *oldest, 0)
        for (place, number), (new, why) in more.items():
            groups[place].tokens[number] += new[:level]
            if new and len(new) <= level:
                groups[place].ended[number] = why
        whole = [group for group in groups if all(group.ended)][: rules.groups_per_step]
        steps.append([row for group in whole for row in rows_of(group)])
        groups = [group for group in groups if group not in whole]
    return steps


def rows_of(group: PlainGroup) -> list[dict[str, Any]]:
    return [
        {
            "uid": group.prompt.uid,
            "ids": [each[0] for each in tokens],
            "logprobs": np.array([each[1] for each in tokens], np.float32).tolist(),
            "versions": [each[2] for each in tokens],
            "truncated": why == "length",
            "reward": tokens[0][0] + tokens[-1][0] / 1000,
        }
        for tokens, why in zip(group.tokens, group.ended, strict=True)
    ]


def parts(num_replicas: int, mood: int) -> tuple[LaunchSampler, Stepwise, PromptLoader]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, "test", dist.group.WORLD)
    engine = Stepwise()
    engine.replica, engine.num_replicas = rank * num_replicas // size, num_replicas
    engine.mood.seed(f"{mood}/{engine.replica}")
    engine.capacity = 5 + mood
    words = " ".join
    display = Display(shown=False)
    sampler = LaunchSampler(engine, FirstToken(), lambda ids: words(map(str, ids)), world, display)
    return sampler, engine, PromptLoader(PROMPTS, seed=1, shuffle=True)


def source(sampler: LaunchSampler, loader: PromptLoader, rules: StepRules) -> Rollouts:
    return rollouts_of(sampler, training_job(loader, SAMPLING, seed=SEED, rules=rules))


def collected(rollouts: Any, engine: Stepwise, step: int) -> dict[int, dict[str, Any]]:
    """The rows whose tokens lie on this rank."""
    engine.weight_version = step - 1
    responses = rollouts.collect(step).responses
    tokens = responses.tokens
    assert (responses.holders[tokens.rows] == dist.get_rank()).all()
    found = {}
    views = [tokens.views(name) for name in ("token_ids", "sampler_logprobs", "weight_versions")]
    for place, row in enumerate(tokens.rows.tolist()):
        ids, logprobs, versions = [view[place].tolist() for view in views]
        assert responses.lengths[row] == len(ids)
        assert responses.weight_versions[row] == versions[0]
        found[row] = {
            "uid": responses.prompts[row].uid,
            "ids": ids,
            "logprobs": logprobs,
            "versions": versions,
            "truncated": bool(responses.truncated[row]),
            "reward": responses.scores[row].reward,
        }
    return found


def steps(num_replicas: int, mood: int, resumed_at: int, rules: StepRules = RULES) -> list[Any]:
    """Of each step; ``resumed_at``: behind it another source goes on from the saved state."""
    sampler, engine, loader = parts(num_replicas, mood)
    rollouts = source(sampler, loader, rules)
    found = []
    for step in range(1, STEPS + 1):
        found.append(collected(rollouts, engine, step))
        if step == resumed_at:
            buffer = io.BytesIO()
            torch.save(rollouts.state(), buffer)
            buffer.seek(0)
            rollouts = source(sampler, PromptLoader(PROMPTS, seed=1, shuffle=True), rules)
            rollouts.restore(torch.load(buffer, weights_only=True))
    return found


def together(of_ranks: Sequence[Any]) -> list[Step]:
    """The rows of all ranks in their order, each once."""
    all_steps = []
    for number in range(STEPS):
        rows: dict[int, dict[str, Any]] = {}
        for found in of_ranks:
            assert not rows.keys() & found[number].keys(), "held twice"
            rows |= found[number]
        all_steps.append([rows[row] for row in sorted(rows)])
    return all_steps


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "resumed_at"), [(1, 1, 0), (2, 2, 0), (2, 1, 0), (4, 2, 3)]
)
def test_what_is_trained_is_what_a_plain_computation_says(
    num_ranks: int, num_replicas: int, resumed_at: int
) -> None:
    expected = plain(RULES, STEPS)
    found = together(call(num_ranks, steps, num_replicas, num_ranks, resumed_at))
    assert json.dumps(found) == json.dumps(expected)
    rows = [row for step in expected for row in step]
    assert len(rows) == STEPS * 4 * 3, "every step has its groups"
    assert sum(len(set(row["versions"])) > 1 for row in rows) > 10, "some go on in the next step"
    assert max(len(set(row["versions"])) for row in rows) == 3, "some of them twice"
    assert any(row["truncated"] for row in rows)
    assert any("#" in row["uid"] for row in rows)


def test_a_run_goes_on_alike_behind_any_step() -> None:
    for resumed_at in range(1, STEPS):
        (found,) = call(1, steps, 1, 1, resumed_at)
        assert json.dumps(together([found])) == json.dumps(plain(RULES, STEPS)), resumed_at


def without_partial() -> list[Any]:
    sampler, engine, loader = parts(1, 1)
    rollouts = rollouts_of(sampler, training_job(loader, SAMPLING, seed=SEED, prompts_per_step=4))
    found = []
    for step in range(1, STEPS + 1):
        engine.weight_version = step - 1
        experience = rollouts.collect(step)
        ids = experience.responses.tokens.views("token_ids")
        uids = [prompt.uid for prompt in experience.responses.prompts]
        found.append([uids, [each.tolist() for each in ids]])
    return found


def test_with_no_more_groups_than_a_step_takes_nothing_goes_on() -> None:
    rules = replace(RULES, groups_in_flight=4)
    (found,) = call(1, steps, 1, 1, 0, rules)
    (expected,) = call(1, without_partial)
    got = [
        [[row["uid"] for row in step], [row["ids"] for row in step]] for step in together([found])
    ]
    assert got == expected


def measured() -> list[dict[str, float]]:
    sampler, engine, loader = parts(1, 1)
    rollouts = source(sampler, loader, RULES)
    found = []
    for step in range(1, STEPS + 1):
        engine.weight_version = step - 1
        experience = rollouts.collect(step)
        unused = {"unused": experience.discarded_tokens}
        found.append({**experience.source_metrics, **unused})
    return found


def test_ages_are_those_of_the_tokens() -> None:
    (found,) = call(1, measured)
    for number, (metrics, rows) in enumerate(zip(found, plain(RULES, STEPS), strict=True)):
        ages = np.array([number - version for row in rows for version in row["versions"]])
        assert metrics["source/staleness_mean"] == pytest.approx(ages.mean())
        assert metrics["source/staleness_max"] == ages.max() <= RULES.max_age
        assert metrics["source/old_tokens_share"] == pytest.approx((ages > 0).mean())
        mixed = [len(set(row["versions"])) > 1 for row in rows]
        assert metrics["source/mixed_share"] == pytest.approx(np.mean(mixed))
        assert metrics["source/group_age_max"] <= RULES.max_age
        assert metrics["unused"] >= 0
    assert max(metrics["source/group_age_max"] for metrics in found) == RULES.max_age
