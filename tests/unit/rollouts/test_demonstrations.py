"""Responses that prompts carry: they take the first places of a group, and the engine samples the
others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollouts.demonstrations import (
    DEMONSTRATED,
    Demonstrations,
    check_demonstrations,
    encoder,
    only,
    put_aside,
    without_demonstrations,
)
from megatron_rl.rollouts.rows.metrics import rollout_metrics
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import GUIDES, Prompt
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.runs import build_bandit, rows


class Letters:
    eos_token_id = 1

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]


ENCODE = encoder(Letters())


def prompt(uid: str, given: Any = None) -> Prompt:
    extra = {"level": 2} if given is None else {"level": 2, "given_responses": given}
    return Prompt(uid, (1, 2), "2", "toy", extra)


def ids(prompt: Prompt, count: int) -> list[list[int] | None]:
    found = [Demonstrations(ENCODE).get(prompt, number) for number in range(count)]
    return [one and list(one.token_ids) for one in found]


def test_demonstrations_take_the_first_places() -> None:
    assert ids(prompt("p", ["ab", [5, 6, 1]]), 4) == [[97, 98, 1], [5, 6, 1], None, None]
    assert ids(prompt("q"), 2) == [None, None]
    assert ids(only(prompt("p", ["ab", [5, 6, 1]]), 1), 2) == [[5, 6, 1], None]
    assert ids(only(prompt("p", ["ab"]), 1), 1) == [None]


def test_they_are_put_aside_for_a_hook() -> None:
    aside = put_aside(prompt("p", ["ab", [5, 6, 1]]), ENCODE)
    assert [list(each.token_ids) for each in aside.extra[GUIDES]] == [[97, 98, 1], [5, 6, 1]]
    assert all(each.spans == ((DEMONSTRATED, 3),) for each in aside.extra[GUIDES])
    assert ids(aside, 2) == [None, None] and aside.extra["level"] == 2
    assert put_aside(prompt("q"), ENCODE).extra == {"level": 2, GUIDES: []}


def test_a_demonstration_is_marked_as_one() -> None:
    found = Demonstrations(ENCODE).get(prompt("p", ["a"]), 0)
    assert found is not None and found.spans == ((DEMONSTRATED, 2),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "prompt p: extra.given_responses = 'a'; give a list"),
        ([], "prompt p: extra.given_responses = []; give a list"),
        ([""], "none of them empty"),
        ([[1, True]], "give a list of texts"),
        ([[1, -1]], "give a list of texts"),
        (["a"] * 5, "has 5 responses, but a group has 4"),
        (["abcde"], "has 6 tokens, and rollout.max_response_tokens is 5"),
    ],
)
def test_what_is_no_response_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        check_demonstrations([prompt("o", ["a"]), prompt("p", given)], ENCODE, 4, 5)


def test_some_prompt_must_carry_one() -> None:
    check_demonstrations([prompt("p"), prompt("q", ["a"])], ENCODE, 4, 5)
    with pytest.raises(ValueError, match=r"no prompt has extra\.given_responses"):
        check_demonstrations([prompt("p")], ENCODE, 4, 5)


def test_held_out_prompts_are_answered_by_the_engine_alone() -> None:
    bare = without_demonstrations(prompt("p", ["a"]))
    assert bare.extra == {"level": 2} and ids(bare, 1) == [None]


def learner_from(tmp_path: Path, num_steps: int, given: list[list[int]]) -> Trainer:
    """Every second prompt of the run brings these responses along."""
    train = prompts(16)
    train[1::2] = [replace(each, extra={"given_responses": given}) for each in train[1::2]]
    return build_bandit(
        tmp_path,
        f"trainer.num_steps={num_steps}",
        method="rl_plus",
        train=train,
        demonstrations=Demonstrations(ENCODE),
    )


def test_metrics_are_of_what_was_sampled(tmp_path) -> None:
    """Given responses, all right, lift no reward and hide no mismatch."""
    trainer = learner_from(tmp_path, 1, [[2, 1, 1]] * 3)
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.source.next(1)
    given = experience.responses.is_demonstration
    assert 0 < given.sum() < len(given) and given.sum() % 3 == 0
    assert experience.correct.numpy()[given].all()
    metrics = rollout_metrics(experience)
    sampled = experience.correct.numpy()[~given]
    assert metrics["reward/accuracy"] == pytest.approx(sampled.mean())
    assert metrics["rollout/num_responses"] == len(given)
    scored = trainer.learner.score(experience)
    updated = trainer.learner.update(1, scored)
    assert updated["mismatch/logprob_abs_diff_max"] < 1e-6
    assert np.isfinite(list(updated.values())).all()
    table = [value for key, value in updated.items() if key.startswith("tokens/")]
    assert sum(table) == experience.responses.lengths[~given].sum(), "given tokens are in no row"


def test_given_responses_teach(tmp_path) -> None:
    """The bandit's right answer is in every second group, and the policy finds it."""
    trainer = learner_from(tmp_path, 3, [[2, 2, 2]])
    trainer.run()
    accuracy = [row["reward/accuracy"] for row in rows(trainer) if row["step"]]
    assert accuracy[-1] > accuracy[0]
