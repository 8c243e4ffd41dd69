"""Choices by name: a name with its own knobs, read from yaml.

The errors say what the knobs of a choice are, and whose knob a wrong one is.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from megatron_rl.errors import close_names, did_you_mean


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Piece):
    """One choice among several; ``name`` says which, the other fields are its knobs."""

    # What an estimator says of its domain, see ``EstimatorNeeds`` of the loss.
    unit_rewards: ClassVar[bool] = False
    check_knobs: ClassVar[Callable[..., str | None]]
    check_rewards: ClassVar[Callable[..., tuple[str, str] | None]]
    # What a rollout hook does beside the responses that are there, see ``trainer.resampling``.
    resamples: ClassVar[bool] = False
    changes_temperature: ClassVar[bool] = False

    name: str

    @property
    def knobs(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name"})


class Choices(dict[str, type[Named]]):
    """The names of one kind of choice, each with the schema of its knobs.

    The functions stand in a room above this one, and so do their knobs. ``home`` is the module
    that describes the package's own here while it is imported; a reader asks for it by name, as
    for a plug-in.
    """

    def __init__(self, what: str, home: str | None = None) -> None:
        super().__init__()
        self.what = what
        self.home = home

    def complete(self) -> Choices:
        """Itself, with the package's own names in it."""
        if self.home is not None:
            importlib.import_module(self.home)
        return self


def _refusal(key: tuple[Any, ...], value: Any, message: str) -> InitErrorDetails:
    """An error at ``key`` below the field: ``<field>.<key> = <value>: <message>``."""
    return InitErrorDetails(
        type=PydanticCustomError("choice", "{text}", {"text": message}), loc=key, input=value
    )


def _built(table: Choices, name: Any, knobs: Mapping[str, Any]) -> Named:
    """The choice ``name`` with its knobs.

    Raises:
        ValidationError: no such name, a knob of another choice, or a value that is refused.
    """
    if name not in table:
        problems = [_refusal(("name",), name, unknown(table.what, table, name))]
        raise ValidationError.from_exception_data(table.what, problems)
    own = [field for field in table[name].model_fields if field != "name"]
    problems = []
    for knob, value in knobs.items():
        if knob not in own:
            problems.append(_refusal((knob,), value, _foreign_knob(table, name, knob, own)))
    if problems:
        raise ValidationError.from_exception_data(table.what, problems)
    # As from a file: there a list may become the tuple that a knob declares.
    return table[name].model_validate_json(json.dumps({"name": name, **knobs}))


def _foreign_knob(table: Choices, name: str, knob: str, own: Sequence[str]) -> str:
    listing = f"its knobs are {', '.join(own)}" if own else "it has no knobs"
    homes = [other for other, schema in table.items() if knob in schema.model_fields]
    wrong = f"is no knob of {table.what} {name}"
    if homes:
        wrong = f"is a knob of {' and '.join(homes)}, but the {table.what} is {name}"
    return f"{wrong} ({listing}); remove it"


def unknown(what: str, names: Collection[str], name: Any) -> str:
    """Why ``name`` is refused, with the nearest name where there is one."""
    if not names:
        return f"is no {what}: there is none; load the plug-in that registers it (--plugin)"
    refusal = f"is not one of the {what}s {', '.join(names)}"
    hint = did_you_mean(close_names(str(name), names))
    return f"{refusal}; {hint}" if hint else refusal


def one_of(table: Choices, *others: str) -> AfterValidator:
    """Accepts the names of ``table``, and ``others``, as plain text."""

    def read(name: str) -> str:
        names = (*others, *table.complete())
        if name not in names:
            raise ValueError(unknown(table.what, names, name))
        return name

    return AfterValidator(read)


def by_name(table: Choices) -> BeforeValidator:
    """Reads ``{name: ..., knobs}``."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        table.complete()
        if "name" not in value:
            problems = [_refusal(("name",), None, f"is missing; choose one of {', '.join(table)}")]
            raise ValidationError.from_exception_data(table.what, problems)
        knobs = {key: knob for key, knob in value.items() if key != "name"}
        return _built(table, value["name"], knobs)

    return BeforeValidator(read)


def by_key(table: Choices) -> BeforeValidator:
    """Reads an ordered ``{name: {knobs}, ...}``; ``name: null`` leaves a choice out."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        table.complete()
        chosen: dict[str, Named] = {}
        problems: list[InitErrorDetails] = []
        for name, knobs in value.items():
            if isinstance(knobs, Named):  # of a configuration that was made in Python
                chosen[name] = knobs
            elif name not in table:
                problems.append(_refusal((name,), knobs, unknown(table.what, table, name)))
            elif isinstance(knobs, Mapping):
                try:
                    chosen[name] = _built(table, name, knobs)
                except ValidationError as error:
                    # Collected, so that all choices are judged, each error under its choice.
                    for detail in error.errors():
                        place = (name, *detail["loc"])
                        problems.append(_refusal(place, detail["input"], detail["msg"]))
            elif knobs is not None:
                message = "must be a mapping of knobs; {} takes the defaults, null leaves it out"
                problems.append(_refusal((name,), knobs, message))
        if problems:
            raise ValidationError.from_exception_data(table.what, problems)
        return chosen

    return BeforeValidator(read)
