"""A run whose first steps are supervised, with a bandit in the roles of policy and engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.load import compose, validate
from megatron_rl.config.method import load_method
from megatron_rl.config.rules.checks import num_optimizer_steps
from megatron_rl.config.rules.source_rules import warm_start_problems
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.signals import signals_of
from megatron_rl.trainer.learner import Learner, MinibatchPlan
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.trainer.warm_start import (
    GivenRows,
    WarmStart,
    WarmStartLearner,
    given_prompts,
    samples,
    supervised,
)
from megatron_rl.types import Prompt
from tests.unit.trainer.fakes import BanditPolicy
from tests.unit.trainer.runs import WORLD, build_bandit, rows, timeless

STEPS = 3  # supervised ones
ROWS = [Prompt(f"row:{number}", (1, 2), "21", "rows") for number in range(6)]


def encode(text: str) -> list[int]:
    return [*map(int, text), 1]


def build(folder: Path, *overrides: str, run: str = "run", **more: Any) -> Trainer:
    """Four rows a step; the right answer, token 2, is the first of each response."""
    trainer = build_bandit(folder, *overrides, run=run, **more)
    assert isinstance(trainer.source, Rollouts) and isinstance(trainer.learner, Learner)
    loader = PromptLoader(ROWS, seed=1, shuffle=True)
    given = GivenRows(ROWS, loader, encode, 4, 1.0, WORLD)
    method = load_method("sft")
    plan = MinibatchPlan(4, 1, seed=1)
    first = replace(trainer.learner, method=method, signals=signals_of(method), plan=plan)
    policy = trainer.learner.policy
    assert isinstance(policy, BanditPolicy)
    return replace(
        trainer,
        source=WarmStart(trainer.source, given, STEPS),
        learner=WarmStartLearner(first, trainer.learner, STEPS, policy.renew_reference),
    )


def policy_of(trainer: Trainer) -> BanditPolicy:
    policy = trainer.learner.policy
    assert isinstance(policy, BanditPolicy)
    return policy


def test_supervised_steps_come_first_and_rollouts_continue_from_them(tmp_path: Path) -> None:
    """The first step by hand: four tokens as likely, two of three in each row are no 1: the cross
    entropy is log 4, and a rate of 0.5 moves the logits by 0.5 (shares - 1/4)."""
    trainer = build(tmp_path, "trainer.num_steps=5", "evaluation.every_steps=2")
    policy, plain = policy_of(trainer), {}
    update = policy.update

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        plain.setdefault("logits", policy.logits.clone())
        return result

    policy.update = noted  # type: ignore[method-assign]
    trainer.run()
    expected = 0.5 * (torch.tensor([0, 2 / 3, 1 / 3, 0], dtype=torch.float64) - 0.25)
    torch.testing.assert_close(plain["logits"], expected, rtol=1e-6, atol=1e-7)
    first, second, third, fourth = rows(trainer)[1:5]
    assert first["loss/policy"] == pytest.approx(1.386294, rel=1e-5)
    assert first["loss/policy"] > second["loss/policy"] > third["loss/policy"]
    assert not [key for key in third if key.startswith(("reward/", "credit/", "mismatch/"))]
    assert third["rollout/response_tokens_mean"] == 3 and "tokens/trained" not in third
    assert fourth["reward/accuracy"] > 0 and fourth["mismatch/logprob_abs_diff_max"] < 1e-6
    assert [row["step"] for row in rows(trainer) if "eval/accuracy" in row] == [0, 2, 4, 5]
    # One pass each, then the reference is renewed, once, before the first rollout is learned from.
    assert policy.passes[: STEPS + 1] == ["update"] * STEPS + ["renew"]
    assert policy.passes.count("renew") == 1 and "reference" in policy.passes


def test_engines_get_the_weights_when_they_are_asked(tmp_path: Path) -> None:
    """Of versions 0 to 5: the evaluation of the start and of step 2, the last supervised step, and
    those of rollouts."""
    trainer = build(tmp_path, "trainer.num_steps=5", "evaluation.every_steps=2")
    assert isinstance(trainer.source, WarmStart)
    colocation = trainer.source.rollouts.engines.colocation  # type: ignore[attr-defined]
    sync, versions = colocation.weight_sync.sync, []

    def noted(version: int) -> Any:
        versions.append(version)
        return sync(version)

    colocation.weight_sync.sync = noted
    trainer.run()
    assert versions == [0, 2, 3, 4, 5]
    assert torch.equal(colocation.engine.logits, policy_of(trainer).logits)


@pytest.mark.parametrize("cut", [2, STEPS, 4])
def test_a_run_that_is_cut_in_either_phase_continues_with_the_same_numbers(
    tmp_path: Path, cut: int
) -> None:
    whole = build(tmp_path, "trainer.num_steps=5", run="whole")
    whole.run()
    build(tmp_path, f"trainer.num_steps={cut}", run="parts").run()
    rest = build(tmp_path, "trainer.num_steps=5", run="parts")
    rest.run()
    assert torch.equal(policy_of(whole).logits, policy_of(rest).logits)
    for row, reference in zip(map(timeless, rows(rest)), map(timeless, rows(whole)), strict=True):
        shared = row.keys() & reference.keys()
        assert {key: row[key] for key in shared} == {key: reference[key] for key in shared}


def test_responses_beyond_the_limit_are_refused() -> None:
    assert given_prompts(ROWS, [], encode, 3) == ROWS
    with pytest.raises(ValueError, match=r"6 of 6 responses .* that of row:0 with 3 tokens"):
        given_prompts(ROWS, [], encode, 2)


def test_held_out_prompts_are_not_trained_on() -> None:
    other = replace(ROWS[0], token_ids=(3,))
    assert given_prompts([*ROWS, other], ROWS[:1], encode, 3) == [other]
    with pytest.raises(ValueError, match="every one of its 6 prompts is also"):
        given_prompts(ROWS, ROWS[:1], encode, 3)


def config(*overrides: str) -> Config:
    common = ["model.path=m", "data.train=t", "data.eval=e", "trainer.num_steps=10"]
    return validate(Config, compose("config", [*common, *overrides]), "test")


def test_supervised_steps_are_one_optimizer_step_each() -> None:
    chosen = config("batch.prompts_per_minibatch=32", "warm_start.steps=4", "warm_start.data=w")
    assert num_optimizer_steps(chosen) == 4 + 6 * 4
    seen = supervised(chosen)
    assert seen.data.train == "w" and seen.data.columns.answer == "response"
    assert samples(chosen) and not samples(config("warm_start.steps=10", "warm_start.data=w"))
    assert (
        seen.data.eval == ()
        and seen.method.name == "sft"
        and seen.batch.prompts_per_minibatch == 128
    )


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["warm_start.steps=4"], ["steps = 4, warm_start.data = None: one needs the other"]),
        (["warm_start.data=w"], ["steps = 0, warm_start.data = w: one needs the other"]),
        (["warm_start.steps=4", "warm_start.data=w"], ["warm_start.data = w: no such file"]),
        (["warm_start.steps=11", "warm_start.data=ROWS"], ["first of trainer.num_steps = 10"]),
        (
            ["warm_start.steps=4", "warm_start.data=ROWS", "warm_start.rows_per_step=1"],
            ["fewer than the 2 data-parallel ranks"],
        ),
        (
            [
                *["warm_start.steps=4", "warm_start.data=ROWS", "source=servers"],
                *["model.lora.rank=4", "method.kl.coef=0.1"],
                *["warm_start.peak_learning_rate=1e-7", "optim.min_learning_rate=1e-6"],
            ],
            ["below optim.min_learning_rate", "servers sample ahead", "the reference of adapters"],
        ),
        (["warm_start.steps=4", "warm_start.data=ROWS", "model.lora.rank=4", "method=dapo"], []),
    ],
)
def test_what_does_not_fit_is_refused(
    overrides: list[str], messages: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}))
    chosen = config(*[word.replace("ROWS", str(path)) for word in overrides])
    problems = list(warm_start_problems(chosen, data_ranks=2))
    assert len(problems) == len(messages)
    for message, problem in zip(messages, problems, strict=True):
        assert message in problem
