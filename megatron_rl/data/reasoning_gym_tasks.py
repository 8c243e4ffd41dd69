"""Generated tasks: ``reasoning_gym:<task>[?key=value&...][+<task>...]``."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.data_names import GENERATED
from megatron_rl.data.rows import Draft, Problems, interleaved
from megatron_rl.errors import close_names, did_you_mean
from megatron_rl.runtime.random_state import preserved_random_state


def load_tasks(spec: str, problems: Problems) -> list[Draft]:
    """The entries of ``spec``, interleaved: every prefix mixes all tasks.

    ``reasoning_gym:chain_sum+gcd?size=256&seed=1``: 256 entries of each. A task without a query of
    its own uses that of the next task that has one, so ``a?size=8&seed=1+b?size=4&seed=2`` gives
    each its own. ``size`` and ``seed`` are required; the other keys are fields of the task's own
    configuration, values written as in JSON (``max_digits=1``, ``operators=["+"]``), else taken as
    text. The data source of an entry is ``reasoning_gym:<task>`` and ``extra`` is the entry, which
    its verifier needs.

    Raises:
        ValueError: reasoning_gym is not installed; unknown task or key, a value that it refuses.
    """
    entries = [_generate(task, query, problems) for task, query in _parse(spec, problems)]
    problems.raise_if_any()
    drafts = []
    for row, entry in enumerate(interleaved(entries), start=1):
        source = GENERATED + entry["metadata"]["source_dataset"]
        # Tasks with many right answers (a puzzle's moves) name none; their verifier has the entry.
        answer = str(entry["answer"] or "")
        drafts.append(Draft(row, entry["question"], answer, source, dict(entry)))
    return drafts


def _parse(spec: str, problems: Problems) -> list[tuple[str, dict[str, Any]]]:
    """(name, query) of every task, in order."""
    tasks: list[tuple[str, dict[str, Any]]] = []
    query: dict[str, Any] = {}
    # From the last: a task without a query has that of the next one.
    for text in reversed(_split_tasks(spec.removeprefix(GENERATED))):
        name, has_query, raw = text.partition("?")
        if has_query:
            pairs = [pair.partition("=") for pair in raw.split("&")]
            query = {key: _value(value) for key, _, value in pairs}
            for key, equals, _ in pairs:
                if not equals:
                    problems.add(text, "not of the form key=value", key, "write task?size=N&seed=S")
        tasks.append((name, query))
    problems.raise_if_any()
    return tasks[::-1]


def _split_tasks(text: str) -> list[str]:
    """``a?size=8+b?size=4`` at each ``+`` that starts a task.

    A ``+`` inside a value belongs to that value: what follows it is no name of a task.
    """
    tasks: list[str] = []
    for fragment in text.split("+"):
        # ``operators=["+"]`` falls into ``...["`` and ``"]``, which is no name.
        if tasks and not fragment.partition("?")[0].replace("_", "").isalnum():
            tasks[-1] += "+" + fragment
        else:
            tasks.append(fragment)
    return tasks


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _generate(task: str, query: Mapping[str, Any], problems: Problems) -> list[dict[str, Any]]:
    factory = _factory()
    if task not in factory.DATASETS:
        hint = did_you_mean(close_names(task, factory.DATASETS, count=2))
        problems.add(task, "no such task", task, hint or "see reasoning_gym.factory.DATASETS")
        return []
    fields = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])}
    for key in sorted(query.keys() - fields):
        hint = did_you_mean(close_names(key, fields))
        problems.add(task, "unknown key", key, hint or f"there are {', '.join(sorted(fields))}")
    for key in ("size", "seed"):
        if type(query.get(key)) is not int:  # to isinstance ``true`` is a whole number
            remedy = f"write {task}?size=N&seed=S"
            problems.add(task, f"{key} must be a whole number", query.get(key), remedy)
    problems.raise_if_any()
    with preserved_random_state():  # some generators draw from the global ones
        try:
            dataset = factory.create_dataset(task, **query)
            return [dataset[index] for index in range(query["size"])]
        except (AssertionError, TypeError, ValueError) as error:
            remedy = str(error) or "see the task's configuration class"
            problems.add(task, "its configuration is refused", dict(query), remedy)
            return []


def _factory() -> Any:
    # Imported on use: it takes seconds, and a run on files does without.
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ValueError(
            "reasoning_gym:... needs the package reasoning-gym; pip install reasoning-gym==0.1.25"
        ) from error
    return factory
