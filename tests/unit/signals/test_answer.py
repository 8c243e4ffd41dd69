"""The probability of the answer in a demonstration: where it is, and what it is, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from megatron_rl.config.method import load_method
from megatron_rl.data.reading import Data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.passes import TokenScores
from megatron_rl.signals import SignalSetup, signals_of
from megatron_rl.signals.response_logprobs import AnswerProbability, last_place
from megatron_rl.types import DEMONSTRATED
from tests.e2e.toy import write_tokenizer
from tests.unit.trainer.runs import WORLD

PIECES = ["1", "+", "12", ".", " is", "2", ""]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[each] for each in token_ids)


@pytest.mark.parametrize(
    ("text", "token_ids", "expected"),
    [
        ("1", [0, 1, 2, 3], [2]),  # "1", "+", "12", ".": within the last that has it
        ("12", [2, 1, 0, 5, 3], [2, 3]),  # of two tokens
        ("12", [2, 6, 1, 3, 6], [0]),  # what says nothing is no part of it
        ("1+1", [0, 1, 2], [0, 1, 2]),
        ("2.", [0, 5, 3], [1, 2]),
        ("is", [0, 4], [1]),
        ("3", [0, 1, 2], []),
        ("", [0, 1], []),
    ],
)
def test_where_a_text_stands_last(text: str, token_ids: list[int], expected: list[int]) -> None:
    assert [*range(len(token_ids))][last_place(text, token_ids, decode)] == expected


def test_letters_of_several_tokens_are_found() -> None:
    """A token for each byte, so that a part of the tokens may begin or end within a letter."""
    token_ids = [*"20 \u20ac\u00e9 = 20 \u20ac\u00e9.".encode()]
    place = last_place("\u20ac\u00e9", token_ids, lambda ids: bytes(ids).decode(errors="replace"))
    assert place == slice(len(token_ids) - 6, len(token_ids) - 1)


def test_of_demonstrations_alone_by_hand(build: Callable) -> None:
    """Tokens of the first response 0.5, 0.2 and 0.4, of which the last two are its answer: 0.3; the
    third has none; the fifth is as the first, but was sampled."""
    trainer = build()
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.learner.placement.to_owners(trainer.source.next(1))
    members = signals_of(load_method("ampo")).members
    (signal,) = [each for each in members if isinstance(each, AnswerProbability)]
    old = torch.full((96,), log(0.9))
    for row in (0, 4):
        old[3 * row : 3 * row + 3] = torch.tensor([0.5, 0.2, 0.4]).log()
    responses = experience.responses
    versions = responses.weight_versions.copy()
    versions[[0, 2]] = DEMONSTRATED
    prompts = [replace(each, answer="yz") for each in responses.prompts]
    experience = replace(experience, old=TokenScores(old))
    view = trainer.learner.view(experience)
    told = {tuple(view.local.batch.token_ids[2:5].tolist()): "xyz"}
    signal.decode = lambda ids: "yz" if len(ids) == 2 else told.get(tuple(ids), "y")
    shown = replace(responses, weight_versions=versions, prompts=prompts)
    view = replace(view, experience=replace(experience, responses=shown))
    found = signal.after_rollout(view)["answer_probability"]
    assert found[0].item() == pytest.approx(0.3)
    assert not found[1:].any()


def test_it_reads_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    signal, data = AnswerProbability(), Data((), (), ())
    write_tokenizer(tmp_path)
    assert signal.prepare(data, SignalSetup(tmp_path, tmp_path, None, WORLD)) is data
    assert signal.decode(load_tokenizer(tmp_path).encode("abba")) == "abba"
