"""Features of rollouts two at a time, on engines of a launch and on servers: both train the same
responses, whatever the timing; and what each feature says holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.hooks.replay import Ar3po, Exgrpo
from megatron_rl.hooks.sampling import Dars, Erpo, Vcrl
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.requests import ServerParts
from megatron_rl.rollouts.backends.served import ServerEngines
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.demonstrations import (
    DEMONSTRATED,
    Demonstrations,
    without_demonstrations,
)
from megatron_rl.rollouts.environments.outcomes import Outcome, turns_of
from megatron_rl.rollouts.environments.turns import Turns, Waiting
from megatron_rl.rollouts.hooks.resampling import Resampling
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.reward_thread import BatchThread, RewardThread
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.runtime.registry import Registration
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.engines import END, Growing, Stepwise
from tests.rollout_sources import rollouts_of, training_job
from tests.unit.trainer.runs import DISPLAY, WORLD, words

STEPS = 5
PROMPTS = [
    Prompt(f"p{number}", (5, number), "1", "toy", {"given_responses": [[1, 2, 3]]})
    for number in range(9)
]
SAMPLING = Sampling(3, max_response_tokens=40)
WHOLE = StepRules(3, 3)
PARTIAL = StepRules(3, 3, groups_in_flight=5, max_age=2)
FILTERED = replace(WHOLE, max_rounds=10)
FILTERED_PARTIAL = replace(PARTIAL, max_rounds=8)
HOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "hooks": lambda: {
        "dars": Dars(schedule="hw", max_responses=7),
        "erpo": Erpo(increase=0.5, highest=2.0),
        "vcrl": Vcrl(kappa=0.1),
    },
    "replay": lambda: {"ar3po": Ar3po(stages=1), "exgrpo": Exgrpo(start=0.0)},
}


class EvenSum:
    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        sums = [sum(map(int, text.split())) for text in texts]
        return [Score(each / 1000, each % 2 == 0) for each in sums]


class FailsAtSevenths(EvenSum):
    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        scores = super().score(prompts, texts, truncated)
        sums = [sum(map(int, text.split())) for text in texts]
        return [
            replace(score, problem="failed") if each % 7 == 0 else score
            for each, score in zip(sums, scores, strict=True)
        ]


class Conversing(Turns):
    """Says some tokens, or nothing more, by what was said; without workers."""

    def __init__(self) -> None:
        self._rendering: Any = SimpleNamespace(end_token_id=END)
        self._ends = None
        self._spent_s = 0.0
        self._thread = BatchThread(self._outcomes, "turns")

    def give(self, waiting: Waiting) -> None:
        self._thread.add(waiting)

    def ended(self, whole: Completion) -> Outcome:
        return Outcome((), whole.truncated)

    def _outcomes(self, waiting: list[Waiting]) -> list[tuple[Any, Outcome]]:
        return [(one.key, self._said(one)) for one in waiting]

    def _said(self, one: Waiting) -> Outcome:
        turns = [list(ids) for ids in turns_of(one.whole)]
        draw = random.Random(f"{one.prompt.uid}/{one.response}/{turns}")
        tokens = [2000 + number for number in range(draw.randrange(1, 12))]
        if draw.random() < 0.3:
            return Outcome()
        if len(one.whole.token_ids) + len(tokens) >= one.most_tokens:
            return Outcome((), truncated=True)
        return Outcome(tokens)


@dataclass(frozen=True)
class Setting:
    rules: Any
    hooks: str = "none"
    has_demonstrations: bool = False
    has_stages: bool = False
    has_turns: bool = False

    def turns(self) -> Turns | None:
        return Conversing() if self.has_turns else None

    def job(self) -> GenerationJob:
        hooks = HOOKS[self.hooks]()
        bare = self.hooks == "replay"
        prompts = [without_demonstrations(each) for each in PROMPTS] if bare else PROMPTS
        return training_job(
            PromptLoader(prompts, seed=1, shuffle=True),
            SAMPLING,
            seed=4,
            rules=self.rules,
            method=load_method("dapo" if self.rules.is_filtered else "grpo"),
            hooks=Resampling(hooks, prompts),
            demonstrations=Demonstrations(lambda text: [7]) if self.has_demonstrations else None,
            response_limit=(lambda step: 10 * min(step, 4)) if self.has_stages else None,
        )


def on_engines(setting: Setting, mood: int) -> list[list[dict[str, Any]]]:
    engine = Stepwise(mood)
    engine.capacity = 4 + mood
    sampler = LaunchSampler(engine, EvenSum(), words, WORLD, DISPLAY, setting.turns())
    rollouts = rollouts_of(sampler, setting.job())
    found = []
    for step in range(1, STEPS + 1):
        engine.weight_version = step - 1
        found.append(rows(rollouts.collect(step)))
    return found


class StepwiseServer:
    """A server that samples as ``Stepwise`` does, some tokens at a time."""

    def __init__(self, engine: Stepwise) -> None:
        self.engine = engine

    async def generate(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int] = ()
    ) -> Completion:
        whole = await self.generate_until(prompt, sampling, response, so_far, lambda count: False)
        return whole[0]

    async def generate_until(
        self,
        prompt: Prompt,
        sampling: Sampling,
        response: int,
        so_far: Sequence[int],
        is_enough: Callable[[int], bool],
    ) -> tuple[Completion, bool]:
        growing = Growing(prompt, sampling, response, list(so_far))
        while True:
            if self.engine.mood.random() < 0.3:
                await asyncio.sleep(0)
            if why := self.engine.grow(growing):
                return growing.completion(self.engine.weight_version, why == "length"), False
            if is_enough(len(growing.new)) and self.engine.mood.random() < 0.5:
                return growing.completion(-1, False), True

    async def close(self) -> None: ...


class OneServer:
    """The registry, and the fleet: who is there has the weights at once."""

    def __init__(self, engine: Stepwise) -> None:
        self.engine = engine

    def look(self) -> dict[str, Registration]:
        return {name: Registration(name, name, 0, 9.0) for name in ("a", "b")}

    def remove(self, name: str) -> None:
        raise AssertionError("no server is lost")

    def keep(self, servers: Any) -> None: ...

    def check_weights(self, step: int) -> None: ...

    def sync(self, version: int, servers: dict[str, str], staged: bool) -> Any:
        self.engine.weight_version = version
        return SimpleNamespace(updated=list(servers), sync=None, lost={})


def on_servers(setting: Setting, mood: int) -> list[list[dict[str, Any]]]:
    engine = Stepwise(mood)
    fleet: Any = OneServer(engine)
    job = setting.job()
    parts = ServerParts(
        connect=lambda url: StepwiseServer(engine),
        switch=lambda url, version: None,
        rewards=lambda wake: RewardThread(EvenSum(), words, wake=wake),
        capacity=3 + mood,
        timeouts=RequestTimeouts(None),
        longest_response=40,
        turns=setting.turns(),
    )
    backends: list[ServerBackend] = []

    def backend(saved: Any) -> ServerBackend:
        backends.append(ServerBackend(job, parts, fleet, saved))
        return backends[-1]

    engines = ServerEngines(WORLD, fleet, None, backend, lambda step: None, DISPLAY, job)
    engines = replace(engines, has_turns=setting.has_turns)
    post = PostRollout(lambda responses, rows: [])
    rollouts = Rollouts(WORLD, fleet, engines, job, post)
    found = []
    try:
        rollouts.publish(0)
        for step in range(1, STEPS + 1):
            found.append(rows(rollouts.next(step)))
            rollouts.publish(step)
    finally:
        for each in backends:
            each.close()
    return found


def rows(experience: Experience) -> list[dict[str, Any]]:
    responses = experience.responses
    views = responses.tokens.views("token_ids")
    sampled = responses.tokens.views(
        "sampled" if responses.num_appended is not None else "token_ids"
    )
    assert responses.tokens.rows.tolist() == list(range(len(responses)))
    return [
        {
            "uid": prompt.uid,
            "group": group,
            "ids": ids.tolist(),
            "sampled": flags.tolist(),
            "truncated": bool(truncated),
            "version": version,
            "correct": score.correct,
            "refused": experience.discarded_groups,
            "discarded": experience.discarded_tokens,
            "left": experience.excluded_tokens + experience.dropped_tokens,
        }
        for prompt, group, ids, flags, truncated, version, score in zip(
            responses.prompts,
            responses.group_ids.tolist(),
            views,
            sampled,
            responses.truncated,
            responses.weight_versions.tolist(),
            responses.scores,
            strict=True,
        )
    ]


SETTINGS = {
    "dynamic sampling, partial": Setting(FILTERED_PARTIAL),
    "hooks, partial": Setting(PARTIAL, "hooks"),
    "hooks, dynamic sampling": Setting(FILTERED, "hooks"),
    "hooks, response stages": Setting(WHOLE, "hooks", has_stages=True),
    "partial, response stages": Setting(PARTIAL, has_stages=True),
    "demonstrations": Setting(WHOLE, has_demonstrations=True),
    "demonstrations, partial": Setting(PARTIAL, has_demonstrations=True),
    "demonstrations, hooks": Setting(WHOLE, "hooks", has_demonstrations=True),
    "replay": Setting(WHOLE, "replay", has_demonstrations=True),
    "replay, partial": Setting(PARTIAL, "replay", has_demonstrations=True),
    "turns": Setting(WHOLE, has_turns=True),
    "turns, partial": Setting(PARTIAL, has_turns=True),
    "turns, partial, replay": Setting(PARTIAL, "replay", True, has_turns=True),
    "all at once": Setting(FILTERED_PARTIAL, "hooks", True, True, True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_engines_and_servers_train_the_same_in_any_timing(name: str, bounded_waits: None) -> None:
    setting = SETTINGS[name]
    expected = on_engines(setting, 1)
    sampled = discarded(expected)
    again = on_engines(setting, 2)
    discarded(again)
    assert again == expected
    for count in (1, 5):
        served = on_servers(setting, count)
        received = discarded(served)
        assert served == expected
        # Servers do not say what they had of a request that was taken back.
        assert all(few <= many for few, many in zip(received, sampled, strict=True))
        assert [few > 0 for few in received] == [step[0]["refused"] > 0 for step in served]
    found = [row for step in expected for row in step]
    check(setting, found, expected)


def discarded(steps: list[list[dict[str, Any]]]) -> list[int]:
    """Takes the number of discarded tokens out of the rows; that of each step."""
    return [max(row.pop("discarded") for row in step) for step in steps]


def check(setting: Setting, found: list[dict[str, Any]], steps: list[list[dict[str, Any]]]) -> None:
    """What each feature says of the responses."""
    sizes = {sum(row["group"] == group for row in step) for step in steps for group in range(3)}
    if setting.hooks == "hooks":
        assert max(sizes) > 3, "groups have grown"
    elif setting.hooks == "none":
        assert sizes == {3}
    if setting.rules.is_filtered:
        assert sum(step[0]["refused"] for step in steps) > 0
    if setting.rules.is_partial:
        versions = [(row["version"], number) for number, step in enumerate(steps) for row in step]
        assert any(0 <= version < number for version, number in versions), "none continued"
    if setting.has_turns:
        appended = [row["sampled"].count(False) for row in found]
        assert sum(map(bool, appended)) > len(found) // 4
        assert all(row["ids"][-1] < 2000 for row in found), "it ends with what was sampled"
        assert all(
            (token >= 2000) != flag
            for row in found
            for token, flag in zip(row["ids"], row["sampled"], strict=True)
        )
    demonstrations = [row for row in found if row["version"] == DEMONSTRATED]
    assert bool(demonstrations) == setting.has_demonstrations
    known = [row["ids"] for row in found if row["version"] >= 0 and row["correct"]]
    assert all(row["ids"] in [[1, 2, 3], *known] for row in demonstrations)
    if setting.has_stages:
        for number, step in enumerate(steps, start=1):
            assert max(len(row["ids"]) for row in step) <= 10 * min(number, 4)


class Counted(Stepwise):
    """Counts the tokens that it has given away: to a launch all, to a server's client those of
    requests that it did not take back."""

    num_tokens = 0

    def poll(self) -> list[tuple[int, Completion]]:
        return self._seen(super().poll(), lambda one: one[1])

    def pause(self, request_ids: Sequence[int]) -> list[Completion]:
        return self._seen(super().pause(request_ids), lambda one: one)

    def abort(self, request_ids: Sequence[int]) -> int:
        count = super().abort(request_ids)
        self.num_tokens += count
        return count

    def _seen(self, given: list[Any], completion: Callable[[Any], Completion]) -> list[Any]:
        self.num_tokens += sum(len(completion(one).token_ids) for one in given)
        return given


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampled_token_is_in_one_row_of_the_table(name: str) -> None:
    """Failed verdicts besides: trained, or out of the step for one reason, or open."""
    setting = SETTINGS[name]
    engine = Counted(1)
    engine.capacity = 5
    job = replace(setting.job(), verdicts=VerdictRules(min_group=2, max_excluded_share=0.9))
    sampler = LaunchSampler(engine, FailsAtSevenths(), words, WORLD, DISPLAY, setting.turns())
    rollouts = rollouts_of(sampler, job)
    reasons: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        engine.weight_version = step - 1
        experience = rollouts.collect(step)
        reasons["trained"] += experience.responses.num_sampled_tokens
        reasons["no_verdict"] += experience.excluded_tokens
        reasons["dropped"] += experience.dropped_tokens
        reasons["discarded"] += experience.discarded_tokens
    assert reasons["no_verdict"] > 0
    held = [one for one in job.store._held.values() if one.spans[0].version != DEMONSTRATED]
    num_open = sum(one.num_sampled for one in held)
    assert reasons.total() + num_open == engine.num_tokens


def test_the_same_seed_draws_other_tokens_in_the_next_step() -> None:
    """Else a continued response would repeat itself."""
    job = Setting(PARTIAL).job()
    job.plan.published(0)
    seeds = {job.plan(step, random.choice(PROMPTS), 0).seed for step in range(1, 9)}
    assert len(seeds) == 8
