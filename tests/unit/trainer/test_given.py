"""Responses that prompts carry: they take the first places of a group, and the engine samples the
others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollouts.given import VERSION, GivenFirst, check_given, encoder, without_given
from megatron_rl.rollouts.metrics import rollout_metrics
from megatron_rl.types import Completion, Prompt, Sampling
from tests.engines import Answering, Stepwise
from tests.unit.trainer.runs import build_bandit, rows

SAMPLING = Sampling(num_responses=4, max_response_tokens=5)
ENCODE = encoder(lambda text: [ord(letter) for letter in text], (1, 7))


def prompt(uid: str, given: Any = None) -> Prompt:
    extra = {"level": 2} if given is None else {"level": 2, "given_responses": given}
    return Prompt(uid, (1, 2), "2", "toy", extra)


class Numbered(Answering):
    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        return Completion((number, number), (-1.0, -1.0), False, 3)


def ended(engine: GivenFirst, request_ids: list[int]) -> list[list[int]]:
    """The token ids behind ``request_ids``, however often one has to ask."""
    found: dict[int, Completion] = {}
    for _ in range(len(request_ids) + 1):
        found.update(engine.poll())
    return [list(found[request_id].token_ids) for request_id in request_ids]


def test_given_responses_take_the_first_places() -> None:
    plain = Numbered()
    engine = GivenFirst(plain, ENCODE)
    request_ids = engine.submit(prompt("p", ["ab", [5, 6, 1]]), [3, 0, 1, 2], SAMPLING)
    assert len(set(request_ids)) == 4
    assert ended(engine, request_ids) == [[3, 3], [97, 98, 1], [5, 6, 1], [2, 2]]
    assert plain.begun == [("p", 3), ("p", 2)]
    assert ended(engine, engine.submit(prompt("q"), [0, 1], SAMPLING)) == [[0, 0], [1, 1]]


def test_a_given_response_is_marked_as_one() -> None:
    engine = GivenFirst(Numbered(), ENCODE)
    engine.submit(prompt("p", ["a"]), [0, 1], SAMPLING)
    versions = {tuple(each.token_ids): each.weight_version for _, each in engine.poll()}
    assert versions == {(97, 1): VERSION, (1, 1): 3}


def test_what_is_stopped_does_not_end() -> None:
    plain = Numbered()
    engine = GivenFirst(plain, ENCODE)
    request_ids = engine.submit(prompt("p", ["a", "b"]), [0, 1, 2, 3], SAMPLING)
    assert engine.abort([request_ids[0], request_ids[2]]) == 2  # tokens that were sampled in vain
    assert {request_id for _ in range(3) for request_id, _ in engine.poll()} == {
        request_ids[1],
        request_ids[3],
    }
    assert engine.running_lengths() == {}


def test_what_the_engine_samples_is_paused() -> None:
    engine = GivenFirst(Stepwise(), ENCODE)
    long = replace(SAMPLING, max_response_tokens=10_000)
    request_ids = engine.submit(prompt("p4", ["a"]), [0, 1], long)
    assert request_ids[0] in dict(engine.poll())
    lengths = engine.running_lengths()
    assert list(lengths) == [request_ids[1]]
    (paused,) = engine.pause([request_ids[1]])
    assert len(paused.token_ids) == lengths[request_ids[1]]
    assert engine.poll() == []


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
        check_given([prompt("o", ["a"]), prompt("p", given)], ENCODE, 4, 5)


def test_some_prompt_must_carry_one() -> None:
    check_given([prompt("p"), prompt("q", ["a"])], ENCODE, 4, 5)
    with pytest.raises(ValueError, match=r"no prompt has extra\.given_responses"):
        check_given([prompt("p")], ENCODE, 4, 5)


def test_held_out_prompts_are_answered_by_the_engine_alone() -> None:
    bare = without_given(prompt("p", ["a"]))
    assert bare.extra == {"level": 2}
    engine = GivenFirst(Numbered(), ENCODE)
    assert ended(engine, engine.submit(bare, [0], SAMPLING)) == [[0, 0]]


def carrying(trainer: Any, given: list[list[int]]) -> None:
    """Every second prompt of the run carries responses."""
    loader = trainer.source.rollouts.loader
    loader._prompts = [
        replace(each, extra={"given_responses": given}) if place % 2 else each
        for place, each in enumerate(loader._prompts)
    ]
    streaming = trainer.source.rollouts.sampler.streaming
    streaming._engine = GivenFirst(streaming._engine, ENCODE)


def test_metrics_are_of_what_was_sampled(tmp_path) -> None:
    """Given responses, all right, lift no reward and hide no mismatch."""
    trainer = build_bandit(tmp_path, "trainer.num_steps=1", method="rl_plus")
    carrying(trainer, [[2, 1, 1]] * 3)
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.source.next(1)
    given = experience.responses.given
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


def test_given_responses_teach(tmp_path) -> None:
    """The bandit's right answer is in every second group, and the policy finds it."""
    trainer = build_bandit(tmp_path, "trainer.num_steps=3", method="rl_plus")
    carrying(trainer, [[2, 2, 2]])
    trainer.run()
    accuracy = [row["reward/accuracy"] for row in rows(trainer) if row["step"]]
    assert accuracy[-1] > accuracy[0]
