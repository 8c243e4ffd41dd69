"""The mapping from columns of a file to roles, and what a role makes of the values it finds."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.schema import DataColumns
from megatron_rl.data.rows import Problems, Rows, lookup
from megatron_rl.errors import close_names, did_you_mean

_AUTO = "auto"
# What other data sets call them, for the hint.
_OTHER_NAMES = {
    "prompt": "question problem query instruction input messages conversation",
    "answer": "ground_truth final_answer solution target label response output"
    " reward_model.ground_truth",
}


def column_roles(rows: Rows, columns: DataColumns, problems: Problems) -> DataColumns:
    """``columns`` with ``auto`` replaced by the column of the role's name, or None without one.

    Raises:
        ValueError: no row has a column that was named; lists the columns there are.
    """
    decided: dict[str, Any] = {}
    for role, column in columns.model_dump().items():
        if isinstance(column, tuple):
            decided[role] = column
            for name in column:
                if not _has_column(rows, name):
                    hint = _hint(role, name, rows)
                    problems.add(f"data.columns.{role}", "no row has this column", name, hint)
        # A file may have a column that is called "auto".
        elif column is None or _has_column(rows, column):
            decided[role] = column
        elif column == _AUTO:
            decided[role] = role if any(role in row for _, row in rows) else None
        else:
            hint = _hint(role, column, rows)
            problems.add(f"data.columns.{role}", "no row has this column", column, hint)
    problems.raise_if_any()
    return DataColumns(**decided)


def _hint(role: str, column: str, rows: Rows) -> str:
    """A suggestion of a column, and a list of those there are."""
    present = sorted({name for _, row in rows for name in row})
    # The first rows are enough: this only helps with a message.
    others = [name for name in _OTHER_NAMES.get(role, "").split() if _has_column(rows[:100], name)]
    likely = [*close_names(column, present), *others][:1]
    advice = [f"{did_you_mean(likely)} data.columns.{role}={name}" for name in likely]
    if role not in _OTHER_NAMES:
        advice.append(f"data.columns.{role}=auto where it may be missing")
    return "; ".join([*advice, f"there are {', '.join(present)}"])


def _has_column(rows: Rows, column: str) -> bool:
    return any(lookup(row, column)[0] for _, row in rows)


LETTERS = "ABCDEFGHIJ"
_NUMBERED = re.compile(r"<image ?(\d+)>")
_LETTERED = re.compile(r"(?:^|;\s*)([A-J])\.\s*")  # before each option of "A. 8; B. 16"


def choices_of(value: Any) -> list[str]:
    """The options of a row: a list, the text of one as Python or JSON write it (MMMU), or ``A. 8;
    B. 16`` (We-Math).

    Raises:
        ValueError: it is none of these, or there are more than there are letters.
    """
    if isinstance(value, str) and _LETTERED.match(value):
        # The text before the first letter (empty), then letter and option in turns.
        _, *parts = _LETTERED.split(value)
        if "".join(parts[::2]) != LETTERS[: len(parts) // 2]:
            raise ValueError("its letters are not A, B, C and so on")
        value = parts[1::2]
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError("not a list of choices, nor the text of one") from None
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > len(LETTERS):
        raise ValueError(f"not a list of at most {len(LETTERS)} choices")
    return [str(choice).strip() for choice in value]


def letter_of(answer: str, choices: Sequence[str], is_index: bool = False) -> str | None:
    """The letter of an answer that is a letter already, or the text of one of the choices.
    ``is_index``: it is the number of a choice, from 0 on.

    Example: of 3 and 7 the answer 7 is B; None where no choice is the answer.
    """
    answer = answer.strip()
    if is_index:
        return LETTERS[int(answer)] if answer.isdecimal() and int(answer) < len(choices) else None
    if answer in choices:  # first: of the choices C and A the answer A is B
        return LETTERS[choices.index(answer)]
    return answer if answer and answer in LETTERS[: len(choices)] else None


def numbered_images(
    text: str, row: Mapping[str, Any], columns: Sequence[str]
) -> tuple[str, list[Any]]:
    """(text, images) of a row with a column for each of its images: ``<image 2>`` is the place of
    that of the second column, and becomes ``<image>``; without that column it is left as it is.
    Without places all images that there are."""
    values = [lookup(row, column)[1] for column in columns]
    found: list[Any] = []

    def place(match: re.Match[str]) -> str:
        number = int(match[1])
        if not 0 < number <= len(values):
            return match[0]
        found.append(values[number - 1])
        return "<image>"

    text = _NUMBERED.sub(place, text)
    return text, [value for value in found or values if value is not None]


def categories_of(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """``task=geometry``, for each value of each column: a text, or a list of them."""
    found = []
    for column in columns:
        _, value = lookup(row, column)
        values = value if isinstance(value, list | tuple) else [value]
        name = column.rpartition(".")[2]
        found += [f"{name}={one}" for one in values if one is not None]
    return found
