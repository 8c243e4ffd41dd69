"""Which column of a file plays which role."""

from __future__ import annotations

import difflib

from megatron_rl.config.schema import DataColumns
from megatron_rl.data.rows import Problems, Rows, lookup

AUTO = "auto"
# What other data sets call them, for the hint.
OTHER_NAMES = {
    "prompt": ("question", "problem", "query", "instruction", "input", "messages", "conversation"),
    "answer": (
        "ground_truth",
        "final_answer",
        "solution",
        "target",
        "label",
        "response",
        "output",
        "reward_model.ground_truth",
    ),
}


def column_roles(rows: Rows, columns: DataColumns, problems: Problems) -> DataColumns:
    """``columns`` with ``auto`` decided: the column of the role's name, None where there is none.

    Raises:
        ValueError: a column that was named and that no row has: key, name, the columns there are.
    """
    decided: dict[str, str | None] = {}
    for role, column in columns.model_dump().items():
        if column is None or any(lookup(row, column)[0] for _, row in rows):
            decided[role] = column
        elif column == AUTO:
            decided[role] = role if any(role in row for _, row in rows) else None
        else:
            hint = _hint(role, column, rows)
            problems.add(f"data.columns.{role}", "no row has this column", column, hint)
    problems.raise_if_any()
    return DataColumns(**decided)


def _hint(role: str, column: str, rows: Rows) -> str:
    present = sorted({name for _, row in rows for name in row})
    close = difflib.get_close_matches(column, present, n=1)
    others = [
        name
        for name in OTHER_NAMES.get(role, ())
        if any(lookup(row, name)[0] for _, row in rows[:100])
    ]
    likely = [*close, *others][:1]
    hint = f"did you mean {likely[0]}? data.columns.{role}={likely[0]}; " if likely else ""
    optional = (
        f"data.columns.{role}=auto where it may be missing; " if role not in OTHER_NAMES else ""
    )
    return f"{hint}{optional}there are {', '.join(present)}"
