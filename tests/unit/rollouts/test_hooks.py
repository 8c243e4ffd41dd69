"""Rollout hooks: what they see, what their answer changes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.hooks import ROLLOUT_HOOKS, RolloutEdit, register_rollout_hook
from megatron_rl.reporting.metrics import metric
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.hooks.rollout_hooks import RolloutHooks
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.rollouts.rows.metrics import rollout_metrics
from megatron_rl.types import Sampling
from tests.rollout_sources import rollouts_of, training_job
from tests.unit.trainer.fakes import BanditEngine, FirstTokenIsAnswer, prompts
from tests.unit.trainer.runs import DISPLAY, WORLD, words

pytestmark = pytest.mark.usefixtures("fresh_registries")


def plain_rollouts() -> Rollouts:
    """Four prompts, three responses each."""
    sampler = LaunchSampler(BanditEngine(), FirstTokenIsAnswer(), words, WORLD, DISPLAY)
    loader = PromptLoader(prompts(16), seed=1, shuffle=False)
    return rollouts_of(sampler, training_job(loader, Sampling(3, 3), seed=1, prompts_per_step=4))


def rollouts(**hooks) -> Rollouts:
    """Those of ``plain_rollouts`` with hooks, in the order given."""
    for name, function in hooks.items():
        register_rollout_hook(name)(function)
    chosen = {name: ROLLOUT_HOOKS[name].schema() for name in hooks}
    plain = plain_rollouts()
    post = replace(plain.post, after_scoring=RolloutHooks(chosen, WORLD))
    return replace(plain, post=post)


def tokens_of(responses: Responses) -> list[list[int]]:
    return [ids.tolist() for ids in responses.tokens.views("token_ids")]


def test_a_run_without_hooks_is_unchanged():
    plain = plain_rollouts().collect(1)
    hooked = rollouts(nothing=lambda step, groups: RolloutEdit()).collect(1)
    for seen in (lambda found: found.prompts, lambda found: found.scores, tokens_of):
        assert seen(plain.responses) == seen(hooked.responses)
    columns = [one.responses.tokens.columns["sampler_logprobs"] for one in (plain, hooked)]
    assert columns[0].tolist() == columns[1].tolist()


def test_rewards_are_replaced_and_groups_dropped_in_the_order_of_the_hooks():
    seen = []

    def number(step, groups):
        rewards = [[10 * index + row for row in range(3)] for index in range(len(groups))]
        return RolloutEdit(rewards=rewards, metrics={"groups": len(groups)})

    def drop_second(step, groups):
        seen.append((step, [[response.score.reward for response in group] for group in groups]))
        return RolloutEdit(keep=[index != 1 for index in range(len(groups))], metrics={"groups": 3})

    result = rollouts(number=number, drop_second=drop_second).collect(7)
    assert seen == [(7, [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]])]
    assert result.rewards.tolist() == [0, 1, 2, 20, 21, 22, 30, 31, 32]
    assert result.group_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert [prompt.uid for prompt in result.responses.prompts[::3]] == ["p0", "p2", "p3"]
    texts = map(words, tokens_of(result.responses))
    assert result.correct.tolist() == [text.startswith("2") for text in texts]
    assert sum(map(len, tokens_of(result.responses))) == 27
    assert int(result.sequences.response_lengths.sum()) == 27
    metrics = rollout_metrics(result)
    assert (metrics["hook/number/groups"], metrics["hook/drop_second/groups"]) == (4, 3)
    assert all(metric(key) for key in metrics)


def test_a_hook_cannot_write_into_what_it_is_shown():
    def greedy(step, groups):
        groups[0][0].score.parts["accuracy"] = 1.0
        return RolloutEdit()

    words = r"hook greedy at step 1: TypeError: 'mappingproxy' .*, line \d+ of test_hooks.py"
    with pytest.raises(ValueError, match=f"^rollout {words}"):
        rollouts(greedy=greedy).collect(1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned NoneType; return a RolloutEdit"),
        (RolloutEdit(keep=[True]), "give 4 of True and False, one per group"),
        (RolloutEdit(keep=[1, 1, 1, 1]), "give 4 of True and False"),
        (RolloutEdit(keep=[False] * 4), "dropped every group of step 3; keep at least one"),
        (
            RolloutEdit(rewards=[[1.0]] * 4),
            "rewards has 4 groups of 1 1 1 1; give 4 groups of 3 3 3 3",
        ),
        (
            RolloutEdit(rewards=[[0, 0, float("nan")]] * 4),
            "a reward of group 0 is nan; rewards are finite",
        ),
        (RolloutEdit(rewards=[[0, 0, "1"]] * 4), "a reward of group 0 is '1'"),
        (RolloutEdit(metrics={"A b": 1}), "metric 'A b' = 1; a key is a-z"),
        (RolloutEdit(metrics={"a": float("inf")}), "metric 'a' = inf"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        rollouts(mine=lambda step, groups: answer).collect(3)


def test_an_error_of_a_hook_names_the_hook_the_step_and_the_line():
    def broken(step, groups):
        return {}["x"]

    words = r"at step 3: KeyError: 'x', line \d+ of test_hooks.py; correct the hook"
    with pytest.raises(ValueError, match=f"^rollout hook broken {words}"):
        rollouts(broken=broken).collect(3)
