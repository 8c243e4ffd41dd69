"""Answers of environments on disk, for a run that was killed."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.rollouts.environments import turns
from megatron_rl.rollouts.environments.turns import Turns, Waiting
from megatron_rl.types import Completion, Prompt
from tests.unit.rollouts import test_turns
from tests.unit.rollouts.test_turns import made

registered, tokenizer = test_turns.registered, test_turns.tokenizer


@pytest.mark.usefixtures("registered")
def test_answers_are_read_again_where_a_step_is_repeated(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an environment that says something else each time, as a search engine may."""
    said = count()
    monkeypatch.setattr(
        Turns,
        "_replies",
        lambda self, items: [
            {"problem": "no"}
            if "bad" in texts[-1]
            else {"messages": [{"role": "user", "content": f"{next(said)}"}]}
            for _, _, texts in items
        ],
    )
    monkeypatch.setattr(turns, "WorkerPool", lambda *_, **__: object())
    end = tokenizer.eos_token_id
    prompt = Prompt("p1", (5,), "four", "toy")

    def answers(started: Turns, step: int | None, *texts: str) -> list[Any]:
        for number, text in enumerate(texts):
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
            whole = Completion(ids, [0.0] * len(ids), False, 0)
            started.give(Waiting(number, step, prompt, number, whole, 99, 0.0))
        found: dict[Any, Any] = {}
        while len(found) < len(texts):
            found |= dict(started.take())
        return [list(found[number].tokens) for number in range(len(texts))]

    first, second = (made(tokenizer, f"run_dir={tmp_path}") for _ in range(2))
    whole = answers(first, 3, "5", "6")
    assert whole[0] != whole[1]
    assert answers(first, 3, "5", "6", "bad") == [*whole, []], "a server has died meanwhile"
    (file,) = (tmp_path / "environment").iterdir()
    file.write_bytes(file.read_bytes()[:-9])  # it was killed as it wrote
    again = answers(second, 3, "5", "6")
    assert again[0] == whole[0] and again[1] != whole[1]
    assert answers(second, 4, "5", "6") != whole and answers(second, None, "5", "6") != whole
    assert len(list((tmp_path / "environment").iterdir())) == 3
    answers(second, 4 + 60, "5")
    assert {path.name[:11] for path in (tmp_path / "environment").iterdir()} == {"step_000064"}
