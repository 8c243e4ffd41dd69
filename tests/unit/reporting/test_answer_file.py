"""Responses on the disk: portions, one file a step, nothing half."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from megatron_rl.reporting.answer_file import AnswerFile, steps_there


def rows(uid: str, *correct: bool) -> list[dict]:
    return [
        {
            "step": 20,
            "uid": uid,
            "data_source": "toy",
            "prompt": "3 + 4 =",
            "answer": "7",
            "number": number,
            "response": "so 7" if is_right else "no\n8",
            "extracted": "7" if is_right else "8",
            "correct": is_right,
            "reward": float(is_right),
            "tokens": 2 + number,
            "truncated": not is_right,
            "problem": None if number < 2 else "its worker died",
            "categories": ["level=1", f"of={uid[0]}"],
        }
        for number, is_right in enumerate(correct)
    ]


def test_portions_become_one_file_in_their_order(tmp_path):
    file = AnswerFile(tmp_path, 20, "digest")
    assert (file.is_whole, file.answered()) == (False, set())
    file.add([rows("b:1", True, False), rows("b:2", True, True)])
    file.add([rows("a:1", False, False, False)])
    assert (file.is_whole, file.answered()) == (False, {"b:1", "b:2", "a:1"})
    file.finish()
    assert (file.is_whole, file.answered()) == (True, {"b:1", "b:2", "a:1"})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000020.parquet"]
    everything = (
        rows("b:1", True, False) + rows("b:2", True, True) + rows("a:1", False, False, False)
    )
    assert pq.read_table(file.path).to_pylist() == everything
    scored = file.scored()
    assert scored.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert scored.correct.tolist() == [True, False, True, True, False, False, False]
    assert scored.lengths.tolist() == [2, 3, 2, 3, 2, 3, 4]
    assert scored.extracted == ["7", "8", "7", "7", "8", "8", "8"]
    assert scored.has_verdict.tolist() == [True] * 6 + [False]
    assert scored.categories[0] == ["level=1", "of=b"]
    assert list(scored.parts()) == ["level=1", "of=a", "of=b"]
    assert steps_there(tmp_path) == {20: "digest"}
    file.finish()  # nothing is left to do
    assert pq.read_table(file.path).num_rows == 7


def test_what_a_kill_cuts_off_is_not_there(tmp_path):
    file = AnswerFile(tmp_path, 20, "digest")
    file.add([rows("a:1", True)])

    def killed():
        yield rows("a:2", True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.add(killed())
    again = AnswerFile(tmp_path, 20, "digest")
    assert again.answered() == {"a:1"}
    again.add([rows("a:2", False)])
    again.finish()
    assert again.scored().correct.tolist() == [True, False]


def test_answers_of_other_weights_and_damaged_files_are_refused(tmp_path):
    file = AnswerFile(tmp_path, 20, "digest")
    file.add([rows("a:1", True)])
    file.check()
    with pytest.raises(
        ValueError, match=r"000000\.parquet: has the answers of other weights of ste"
    ):
        AnswerFile(tmp_path, 20, "other").check()
    file.finish()
    with pytest.raises(ValueError, match=r"step_000020\.parquet: has the answers of other weights"):
        AnswerFile(tmp_path, 20, "other").check()
    file.path.write_bytes(file.path.read_bytes()[:-9])
    with pytest.raises(
        ValueError, match=r"step_000020\.parquet: .*; delete it: its prompts are as"
    ):
        file.check()


def test_a_portion_that_was_damaged_and_deleted_leaves_the_others_alone(tmp_path):
    file = AnswerFile(tmp_path, 20, "digest")
    for uid in ("a:1", "a:2", "a:3"):
        file.add([rows(uid, True)])
    (tmp_path / "step_000020.parts" / "000001.parquet").unlink()  # as its message asks for
    assert file.answered() == {"a:1", "a:3"}
    file.add([rows("a:2", False)])
    assert file.answered() == {"a:1", "a:2", "a:3"}
    file.finish()
    assert pq.read_table(file.path)["uid"].to_pylist() == ["a:1", "a:3", "a:2"]
