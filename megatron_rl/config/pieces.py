"""Choices by name: a piece is a name with its own knobs, read from yaml with errors that name the right home of a knob."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Piece):
    """One choice among several; ``name`` says which."""

    unit_rewards: ClassVar[bool] = False  # an estimator that needs rewards in [0, 1]

    name: str


def table_of(*pieces: type[Named]) -> dict[str, type[Named]]:
    return {piece.model_fields["name"].default: piece for piece in pieces}


def _refusal(key: tuple[Any, ...], value: Any, message: str) -> InitErrorDetails:
    """An error at ``key`` below the field being validated, reported as ``<field>.<key> = <value>: <message>``."""
    return InitErrorDetails(type=PydanticCustomError("choice", "{text}", {"text": message}), loc=key, input=value)


def _built(kind: str, table: Mapping[str, type[Named]], name: Any, knobs: Mapping[str, Any]) -> Named:
    """The piece ``name`` with its knobs.

    Raises:
        ValidationError: no such name, a knob of another piece, or a value the piece refuses.
    """
    if name not in table:
        problems = [_refusal(("name",), name, _unknown(kind, table, name))]
        raise ValidationError.from_exception_data(kind, problems)
    own = [field for field in table[name].model_fields if field != "name"]
    listing = f"its knobs are {', '.join(own)}" if own else "it has no knobs"
    problems = []
    for knob in knobs:
        homes = [other for other, piece in table.items() if knob in piece.model_fields]
        if knob not in own:
            wrong = f"is a knob of {' and '.join(homes)}, but the {kind} is {name}" if homes else f"is no knob of {kind} {name}"
            problems.append(_refusal((knob,), knobs[knob], f"{wrong} ({listing}); remove it"))
    if problems:
        raise ValidationError.from_exception_data(kind, problems)
    # As from a file: there a list may become the tuple that a knob declares.
    return table[name].model_validate_json(json.dumps({"name": name, **knobs}))


def _unknown(kind: str, table: Mapping[str, type[Named]], name: Any) -> str:
    """Why ``name`` is refused, with the nearest name where there is one."""
    if not table:
        return f"is no {kind}: there is none; load the plug-in that registers it (--plugin)"
    close = difflib.get_close_matches(str(name), table, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"is not one of the {kind}s {', '.join(table)}{hint}"


def by_name(kind: str, table: Mapping[str, type[Named]]) -> BeforeValidator:
    """Reads ``{name: ..., knobs}``."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "name" not in value:
            problems = [_refusal(("name",), None, f"is missing; choose one of {', '.join(table)}")]
            raise ValidationError.from_exception_data(kind, problems)
        return _built(kind, table, value["name"], {key: knob for key, knob in value.items() if key != "name"})

    return BeforeValidator(read)


def by_key(kind: str, table: Mapping[str, type[Named]]) -> BeforeValidator:
    """Reads an ordered ``{name: {knobs}, ...}``; ``name: null`` leaves a piece out."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        pieces: dict[str, Named] = {}
        problems: list[InitErrorDetails] = []
        for name, knobs in value.items():
            if isinstance(knobs, Named):
                pieces[name] = knobs
            elif name not in table:
                problems.append(_refusal((name,), knobs, _unknown(kind, table, name)))
            elif isinstance(knobs, Mapping):
                try:
                    pieces[name] = _built(kind, table, name, knobs)
                except ValidationError as error:
                    problems += [_refusal((name, *found["loc"]), found["input"], found["msg"]) for found in error.errors()]
            elif knobs is not None:
                problems.append(_refusal((name,), knobs, "must be a mapping of knobs; {} takes the defaults, null leaves it out"))
        if problems:
            raise ValidationError.from_exception_data(kind, problems)
        return pieces

    return BeforeValidator(read)
