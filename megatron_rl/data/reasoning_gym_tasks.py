"""Generated tasks: ``reasoning_gym:<task>[?key=value&...][+<task>...]``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.data_names import GENERATED
from megatron_rl.data.rows import Problems
from megatron_rl.runtime.random_state import preserved_random_state

PREFIX = GENERATED
Draft = tuple[int, Any, str, str, Mapping[str, Any]]  # row, prompt, answer, data source, extra


def load_tasks(spec: str, problems: Problems) -> list[Draft]:
    """The entries of ``spec``, the tasks taking turns so that any first part of the list holds all of them.

    ``reasoning_gym:chain_sum+gcd?size=256&seed=1``: 256 entries of each. A task without a query of its own uses that of the next task
    that has one, so ``a?size=8&seed=1+b?size=4&seed=2`` gives each its own. ``size`` and ``seed`` are required; the other keys are
    fields of the task's own configuration, values written as in JSON (``max_digits=1``, ``operators=["+"]``), else taken as text.
    The data source of an entry is ``reasoning_gym:<task>`` and ``extra`` is the entry, which its verifier needs.

    Raises:
        ValueError: reasoning_gym is not installed; unknown task or key, a value its configuration refuses.
    """
    parts = [_generate(task, query, problems) for task, query in _parse(spec, problems)]
    problems.raise_if_any()
    drafts = []
    for turn in range(max(len(part) for part in parts)):
        for entry in (part[turn] for part in parts if turn < len(part)):
            source = PREFIX + entry["metadata"]["source_dataset"]
            drafts.append((len(drafts) + 1, entry["question"], str(entry["answer"] or ""), source, entry))
    return drafts


def _parse(spec: str, problems: Problems) -> list[tuple[str, dict[str, Any]]]:
    parts: list[tuple[str, dict[str, Any]]] = []
    query: dict[str, Any] = {}
    # A + inside a value is part of that value: only one that a task name follows starts a new task.
    for text in reversed(_split_tasks(spec.removeprefix(PREFIX))):
        task, has_query, raw = text.partition("?")
        if has_query:
            pairs = [pair.partition("=") for pair in raw.split("&")]
            query = {key: _value(value) for key, _, value in pairs}
            for key, equals, _ in pairs:
                if not equals:
                    problems.add(text, "not of the form key=value", key, "write task?size=N&seed=S")
        parts.insert(0, (task, query))
    problems.raise_if_any()
    return parts


def _split_tasks(text: str) -> list[str]:
    parts: list[str] = []
    for piece in text.split("+"):
        name = piece.partition("?")[0]
        if parts and not name.replace("_", "").isalnum():
            parts[-1] += "+" + piece
        else:
            parts.append(piece)
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _generate(task: str, query: Mapping[str, Any], problems: Problems) -> list[dict[str, Any]]:
    factory = _factory()
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(task, factory.DATASETS, n=2)
        problems.add(task, "no such task", task, f"did you mean {' or '.join(close)}?" if close else "see reasoning_gym.factory.DATASETS")
        return []
    fields = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])}
    for key in sorted(query.keys() - fields):
        close = difflib.get_close_matches(key, fields, n=1)
        problems.add(task, "unknown key", key, f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(fields))}")
    for key in ("size", "seed"):
        if type(query.get(key)) is not int:
            problems.add(task, f"{key} must be a whole number", query.get(key), f"write {task}?size=N&seed=S")
    problems.raise_if_any()
    with preserved_random_state():  # some generators draw from the global ones
        try:
            dataset = factory.create_dataset(task, **query)
            return [dataset[index] for index in range(query["size"])]
        except (AssertionError, TypeError, ValueError) as error:
            problems.add(task, "its configuration is refused", dict(query), str(error) or "see the task's configuration class")
            return []


def _factory() -> Any:
    # Imported on use: it takes seconds, and a run on files does without.
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ValueError("reasoning_gym:... needs the package reasoning-gym; pip install reasoning-gym==0.1.25") from error
    return factory
