"""The mapping from columns of a file to roles."""

from __future__ import annotations

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
    decided: dict[str, str | None] = {}
    for role, column in columns.model_dump().items():
        # A file may have a column that is called "auto".
        if column is None or _has_column(rows, column):
            decided[role] = column
        elif column == _AUTO:
            is_there = any(role in row for _, row in rows)
            decided[role] = role if is_there else None
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
