"""Responses without a verdict leave a step: every method learns what it would have learned if they
had not been sampled, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.hooks import ScoredGroup
from megatron_rl.hooks.sampling import Dars, Erpo, Vcrl
from megatron_rl.loss import ResponseBatch, TokenBatch
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.hooks.resampling import Resampling
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Responses, experience_of
from megatron_rl.rollouts.rows.verdicts import VerdictRules, excluded_share
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.engines import Answering
from tests.rollout_sources import rollouts_of, training_job
from tests.unit.loss.batches import LIMIT, response_batch, rollout, token_batch
from tests.unit.rollouts.test_responses import responses
from tests.unit.trainer import runs
from tests.unit.trainer.fakes import BanditEngine, FirstTokenIsAnswer, prompts
from tests.unit.trainer.runs import DISPLAY, WORLD, rows, samples, timeless

NAMES = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
# What they read a bandit has not: images, other tokens' logprobs, a teacher, demonstrations.
UNFED = ("arm", "durian", "durian_perceptual", "opd", "opd_top_k", "score_centered", "sft", "simko")
NEEDS_A_LENGTH = {
    **{name: ["aggregate.norm_len=3"] for name in ("a_grae_dr_grpo", "dr_grpo", "siren")},
    "dapo": ["reward_shaping.overlong.max_tokens=4"],
}
# Statistics of groups, of the step, of tokens; histories, peaks, dynamic sampling, k of a group.
CORE = ("dapo", "dcpo", "grpo", "krpo", "pass_at_k", "reinforce_pp", "siren")
FAILED = Score(0.0, False, problem="its worker died")
MARK = 4  # tokens of a response whose verifier fails; the others have three
LARGE_SHARE = "reward.max_excluded_share=0.5"


def some_failed(*rows: int) -> Responses:
    whole = responses()
    scores = [FAILED if row in rows else score for row, score in enumerate(whole.scores)]
    return replace(whole, scores=scores)


@pytest.mark.parametrize(
    ("failed", "min_group", "left"),
    [
        ((), 2, [0, 1, 2, 3, 4]),
        ((4,), 1, [0, 1, 2, 3]),
        ((4,), 2, [0, 1, 2]),  # row 3 would be alone; row 2 was, before anything failed
        ((2,), 1, [0, 1, 3, 4]),
        ((0, 3), 2, [2]),
        ((0, 1, 2, 3, 4), 1, []),
    ],
)
def test_what_is_left_of_groups_of_2_1_and_2(failed, min_group, left):
    judged = VerdictRules(min_group, 1.0).judged(some_failed(*failed))
    assert [score.reward for score in judged.scores] == left
    assert judged.lengths.tolist() == [row + 1 for row in left]
    assert judged.group_ids.tolist() == sorted(judged.group_ids.tolist())
    assert set(judged.group_ids.tolist()) == set(range(judged.num_groups))


def test_a_step_with_too_many_names_the_causes():
    fine = [Score(1.0, True)] * 7
    assert excluded_share(fine, 0.0, "step 3") == 0
    assert excluded_share([*fine, FAILED], 0.125, "step 3") == 0.125
    late = replace(FAILED, problem="no verdict within reward.timeout_s = 5 s")
    with pytest.raises(ValueError) as raised:
        excluded_share([*fine, late, FAILED, late], 0.2, "step 3")
    assert str(raised.value).startswith(
        "step 3: 3 of 10 responses have no verdict, which is above reward.max_excluded_share = 0.2:"
        " 2 times no verdict within reward.timeout_s = 5 s; 1 times its worker died. Correct"
    )
    with pytest.raises(ValueError, match="1 of 1 responses have no verdict"):
        excluded_share([FAILED], 1.0, "held-out evaluation")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_gradient_of_the_step_without_them(name):
    """Groups of unequal sizes that lose none, one or most of their responses; one leaves."""
    method = load_method(name, response_limit=LIMIT)
    step = rollout(1)
    group_ids = np.array([row.group for row in step])
    first_of = {group: int(np.flatnonzero(group_ids == group)[0]) for group in range(8)}
    # Of 4, 4, 5, 8, 8, 5, 4 and 6; nothing is left of group 6.
    failed = [first_of[0], first_of[3] + 1, first_of[4], first_of[4] + 7, first_of[5] + 2]
    failed += [first_of[6] + place for place in range(4)]
    everything = token_batch(step, method.credit(response_batch(step)))
    gone = {*failed}
    if name == "pass_at_k":  # its k is 4, and 3 of group 0 are left
        gone |= set(np.flatnonzero(group_ids == 0))
    by_hand = [row for row in range(len(step)) if row not in gone]
    found = gradient_of(name, step, everything, judged_rows(step, failed, method.config.min_group))
    wanted = gradient_of(name, step, everything, by_hand)
    assert torch.equal(found, wanted) and found.abs().sum() > 0


def judged_rows(step: Sequence, failed: Sequence[int], min_group: int) -> list[int]:
    """The numbers of the rows that ``VerdictRules`` leaves, which stand in the rewards."""
    lengths = np.array([row.length for row in step])
    sampled = responses()
    whole = Responses(
        prompts=[Prompt(f"p{row.group}", (1,), "", "") for row in step],
        group_ids=np.array([row.group for row in step]),
        lengths=lengths,
        truncated=lengths > LIMIT,
        weight_versions=np.zeros(len(step), dtype=np.int64),
        scores=[FAILED if row in failed else Score(float(row), False) for row in range(len(step))],
        tokens=sampled.tokens.take([]),
        holders=np.zeros(len(step), dtype=np.int64),
    )
    return experience_of(VerdictRules(min_group, 1.0).judged(whole)).rewards.int().tolist()


def gradient_of(name: str, step: Sequence, whole: TokenBatch, rows: list[int]) -> torch.Tensor:
    """Of the logprobs of ``rows``, where the step has no others: of the sampled tokens, then of the
    likely ones, where the loss reads them."""
    method = load_method(name, response_limit=LIMIT)
    of_all = response_batch(list(step))
    at = torch.tensor(rows)

    def chosen(column: torch.Tensor) -> torch.Tensor:
        return column[at] if column.shape[:1] == (len(step),) else column

    credit = method.credit(
        ResponseBatch(
            rewards=of_all.rewards[at],
            correct=of_all.correct[at],
            group_ids=torch.unique(of_all.group_ids[at], return_inverse=True)[1],
            response_tokens=of_all.response_tokens[at],
            columns={column: chosen(values) for column, values in of_all.columns.items()},
        )
    )
    here = torch.isin(whole.response_index, at)
    fields = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "loss_mask")
    of_tokens = {field: getattr(whole, field).detach()[here] for field in fields}
    logprobs = of_tokens["logprobs"].requires_grad_()
    leaves = [logprobs]
    of_columns = {name: values.detach()[here] for name, values in whole.token_columns.items()}
    if "likely_logprobs" in of_columns:
        leaves.append(of_columns["likely_logprobs"].requires_grad_())
    columns = {column: chosen(values) for column, values in whole.columns.items()}
    columns["end_index"] = torch.arange(len(rows))
    batch = replace(
        whole,
        **of_tokens,
        correct=of_all.correct[at],
        group_ids=of_all.group_ids[at],
        response_index=torch.searchsorted(at, whole.response_index[here]),
        advantages=credit.advantages,
        kl_weights=credit.kl_weights,
        token_columns=of_columns,
        columns=columns,
    )
    method.loss(batch).loss.backward()
    return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])


class MarkedEngine(BanditEngine):
    """The sixth response to every prompt is one that its verifier cannot judge."""

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        if number == 5:
            return Completion([2] * MARK, [-0.5] * MARK, False, self.weight_version)
        return super().response(prompt, sampling, number)


class FailsAtMarked(FirstTokenIsAnswer):
    def score(self, prompts, texts, truncated) -> list[Score]:
        scores = super().score(prompts, texts, truncated)
        return [
            FAILED if len(text.split()) == MARK else score
            for text, score in zip(texts, scores, strict=True)
        ]


@pytest.fixture
def marked(build: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "BanditEngine", MarkedEngine)
    monkeypatch.setattr(runs, "FirstTokenIsAnswer", FailsAtMarked)

    def run(method: str, size: int, *overrides: str) -> Trainer:
        trainer = build(
            *overrides,
            f"batch.responses_per_prompt={size}",
            "trainer.epochs_per_rollout=2",
            LARGE_SHARE,
            method=method,
            method_overrides=NEEDS_A_LENGTH.get(method, ()),
            run=f"{method} {size}",
        )
        trainer.run()
        return trainer

    return run


@pytest.mark.parametrize(
    "name",
    [
        name if name in CORE else pytest.param(name, marks=pytest.mark.full)
        for name in sorted({*NAMES} - {*UNFED})
    ],
)
def test_a_run_is_that_with_one_response_fewer(marked, name):
    """Through the trainer: dynamic sampling, statistics of the step, minibatches, metrics."""
    with_it = marked(name, 6)
    without = marked(name, 5)
    assert torch.equal(with_it.learner.policy.logits, without.learner.policy.logits)
    assert with_it.learner.policy.logits.any(), "nothing was learned"
    own = {"reward/excluded_share", "tokens/no_verdict", "tokens/discarded"}
    for row, other in zip(rows(with_it), rows(without), strict=True):
        assert {key for key, value in timeless(row).items() if value != other.get(key)} <= own
        if row["step"]:
            assert (row["reward/excluded_share"], other["reward/excluded_share"]) == (1 / 6, 0)
            assert row["tokens/no_verdict"] == 4 * MARK and other["tokens/no_verdict"] == 0


def test_a_response_that_counts_as_wrong_changes_the_run(marked, monkeypatch):
    without = marked("grpo", 5)
    monkeypatch.setattr(runs, "FirstTokenIsAnswer", FirstTokenIsAnswer)
    counted = marked("grpo", 6)
    assert not torch.equal(counted.learner.policy.logits, without.learner.policy.logits)


def test_all_sampled_tokens_are_in_one_row_of_the_table(marked):
    """Dynamic sampling, a filter and failed verdicts in one step."""
    trainer = marked("dapo", 6, "evaluation.at_start=false", "evaluation.at_end=false")
    engine = trainer.source.engines.backend.engine
    num_sampled = sum(MARK if number == 5 else 3 for _, number in engine.begun)
    reasons = ("trained", "filtered", "no_verdict", "dropped", "discarded")
    table = [[row[f"tokens/{reason}"] for reason in reasons] for row in rows(trainer)]
    assert sum(map(sum, table)) == num_sampled
    assert all(sum(column) for column in list(zip(*table, strict=True))[::2])
    for row in rows(trainer):
        share = 1 - row["tokens/trained"] / sum(row[f"tokens/{each}"] for each in reasons)
        assert row["throughput/discarded_tokens_share"] == pytest.approx(share, rel=1e-12)


def test_overlong_responses_stay_in_the_loss(build):
    """A penalty on their reward is all: their tokens are among those that are trained."""
    trainer = build(
        *("trainer.num_steps=1", "batch.responses_per_prompt=4"),
        method_overrides=["reward_shaping.overlong={max_tokens: 2}"],
    )
    trainer.run()
    (row,) = [one for one in rows(trainer) if one["step"]]
    assert row["tokens/trained"] == 4 * 4 * 3 and row["tokens/filtered"] == 0


class Counting(Answering):
    """Three tokens: the number of the prompt, of the response, and 2."""

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        place = int(re.findall(r"\d+", prompt.uid)[0])
        return Completion([place, number, 2], [-0.5] * 3, False, 0)


class FailsFor(dict):
    """A reward: of each prompt, by its number, the responses that cannot be judged."""

    def score(self, prompts, texts, truncated) -> list[Score]:
        found = []
        for text in texts:
            prompt, response, _ = map(int, text.split())
            fails = response in self.get(prompt, ())
            found.append(FAILED if fails else Score(float(response % 2), response % 2 == 1))
        return found


def source(fails: dict, method: str = "grpo", hooks=None, share: float = 0.99) -> Rollouts:
    """Two prompts a step, of four, with four responses each."""
    reward = FailsFor(fails)
    sampler = LaunchSampler(Counting(), reward, lambda ids: " ".join(map(str, ids)), WORLD, DISPLAY)
    job = training_job(
        PromptLoader(prompts(4), seed=1, shuffle=False),
        Sampling(4, 4),
        seed=1,
        prompts_per_step=2,
        method=load_method(method, ["reward_shaping.overlong=null"] if method == "dapo" else ()),
        hooks=Resampling(hooks or {}, prompts(4)),
        max_excluded_share=share,
    )
    return rollouts_of(sampler, job)


def trained(experience) -> list[list[int]]:
    """The numbers of prompt and response of each row."""
    return [ids.tolist()[:2] for ids in experience.responses.tokens.views("token_ids")]


def test_groups_are_what_remains_and_too_small_ones_leave():
    experience = source({0: (1,), 1: (0, 1, 2)}).collect(1)
    assert trained(experience) == [[0, 0], [0, 2], [0, 3]]
    assert experience.excluded_tokens == 5 * 3 and experience.excluded_share == 4 / 8
    groups = source({0: (1,), 1: (0, 1, 2)}, "nsr").collect(1).group_ids
    assert set(groups.tolist()) == {0, 1}, "one is enough there"
    assert source({1: (0,)}, "pass_at_k").collect(1).responses.num_groups == 1, "its k is 4"


def test_dynamic_sampling_judges_what_remains_and_samples_again():
    """Of prompt 0 only right ones remain, of prompt 1 one: the step takes prompts 2 and 3."""
    experience = source({0: (0, 2), 1: (1, 2, 3)}, "dapo").collect(1)
    assert [prompt for prompt, _ in trained(experience)] == [2] * 4 + [3] * 4
    assert experience.discarded_groups == 2 and experience.excluded_share == 5 / 16
    assert experience.excluded_tokens == 0 and experience.discarded_tokens == 8 * 3


@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_a_verifier_that_always_fails_ends_the_run_with_the_cause(method):
    always = {number: range(4) for number in range(4)}
    with pytest.raises(ValueError, match=r"step 1: .* responses have no verdict.*its worker died"):
        source(always, method).collect(1)


def test_a_step_without_a_large_enough_group_ends_the_run():
    most = dict.fromkeys(range(4), (0, 1, 2))
    with pytest.raises(ValueError, match="no group has 2 responses with a verdict"):
        source(most).collect(1)


def test_sampling_hooks_see_verdicts_and_ask_no_more_than_they_may():
    """Prompt 0 is never judged, so dars does not know how hard it is, and asks no more."""
    hooks = {"erpo": Erpo(increase=0.5), "dars": Dars(max_responses=8)}
    rollouts = source({0: range(4)}, hooks=hooks)
    experience = rollouts.collect(1)
    assert experience.responses.num_groups == 1
    assert {prompt for prompt, _ in trained(experience)} == {1}
    assert experience.hook_metrics["hook/dars/hard_groups"] == 0
    assert experience.hook_metrics["hook/erpo/residual_groups"] == 0, "no verdict is not all right"
    group = ScoredGroup.of(prompts(1)[0], [FAILED, Score(1.0, True)])
    assert (len(group.scores), group.num_correct, group.num_responses) == (1, 1, 2)
    hook = Vcrl(kappa=1.0)
    hook.bank["p3"] = (1.0, prompts(4)[3])
    assert hook.resample(2, 0, [group]).asks[0].num_responses == 2


def test_a_run_above_the_limit_shows_what_it_could_not_judge(marked, build):
    trainer = build(
        "batch.responses_per_prompt=6", "reward.max_excluded_share=0.1", "logging.log_samples=24"
    )
    with pytest.raises(ValueError, match=r"step 1: 4 of 24 .* 4 times its worker died"):
        trainer.run()
    shown = samples(trainer)
    assert {row.get("problem") for row in shown} == {None, "its worker died"}


def test_an_evaluation_above_the_limit_ends_the_run(build, monkeypatch):
    class Never(FirstTokenIsAnswer):
        def score(self, prompts, texts, truncated) -> list[Score]:
            return [FAILED for _ in texts]

    monkeypatch.setattr(runs, "FirstTokenIsAnswer", Never)
    with pytest.raises(ValueError, match="held-out evaluation: 4 of 4 responses have no verdict"):
        build().run()
