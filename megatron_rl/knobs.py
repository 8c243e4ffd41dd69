"""Choices by name: a function of the package or of a plug-in, under a name of a yaml, with its
keyword-only arguments as knobs.

The errors say what the knobs of a choice are, and whose knob a wrong one is.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    create_model,
)
from pydantic.errors import PydanticUserError
from pydantic_core import InitErrorDetails, PydanticCustomError

from megatron_rl.errors import RegistrationError, close_names, did_you_mean, first_line

NAME = re.compile(r"[a-z][a-z0-9_]*")


class Piece(BaseModel):
    """A part of a configuration: strict and frozen."""

    # Numbers are finite: JSON has no others, and a rate of inf is written into every weight.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def with_values(self, **sections: Mapping[str, Any]) -> Self:
        """With other values in sections. Example: ``config.with_values(data={"train": ()})``."""
        named = sections.items()
        parts = {name: getattr(self, name).model_copy(update=keys) for name, keys in named}
        return self.model_copy(update=parts)


class Named(Piece):
    """One choice among several; ``name`` says which, the other fields are its knobs."""

    name: str

    @property
    def knobs(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name"})


class Choices(dict[str, Any]):
    """The entries of one kind of choice, by name; each has a ``schema``."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def schema(self, name: str) -> type[Named]:
        """What the configuration checks the knobs of ``name`` by."""
        return self[name].schema


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
    own = [field for field in table.schema(name).model_fields if field != "name"]
    problems = []
    for knob, value in knobs.items():
        # A configuration that was written out names its choices once more below their keys.
        if knob not in own and (knob, value) != ("name", name):
            problems.append(_refusal((knob,), value, _foreign_knob(table, name, knob, own)))
    if problems:
        raise ValidationError.from_exception_data(table.what, problems)
    # As from a file: there a list may become the tuple that a knob declares.
    return table.schema(name).model_validate_json(json.dumps({"name": name, **knobs}))


def _foreign_knob(table: Choices, name: str, knob: str, own: Sequence[str]) -> str:
    listing = f"its knobs are {', '.join(own)}" if own else "it has no knobs"
    homes = [other for other in table if knob in table.schema(other).model_fields]
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


def one_of(what: str, table: Collection[str], *others: str) -> AfterValidator:
    """Accepts the names of ``table``, and ``others``, as plain text."""

    def read(name: str) -> str:
        names = (*others, *table)
        if name not in names:
            raise ValueError(unknown(what, names, name))
        return name

    return AfterValidator(read)


def by_name(table: Choices) -> BeforeValidator:
    """Reads ``{name: ..., knobs}``."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
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


def new_schema(
    table: Choices, name: str, function: Callable[..., Any], positional: Sequence[str]
) -> type[Named]:
    """A strict schema with one field for each keyword-only argument of ``function``.

    Example: ``def f(evidence, *, limit: float = 2.0)`` under the name ``"clipped"`` gives a schema
    with ``name = "clipped"`` and ``limit: float = 2.0``; the yaml must set what has no default.

    Args:
        positional: the arguments the caller passes, by their usual names; the function may call
            them otherwise.

    Raises:
        RegistrationError: ``table`` has the name, or an argument cannot be a knob.
    """
    _check_name(table, name)
    subject = f"{table.what} {name}"
    if not inspect.isfunction(function):  # knobs are read from its signature and annotations
        raise RegistrationError(f"{subject}: {function!r} is no plain function; write one by def")
    parameters = list(inspect.signature(function).parameters.values())
    knobs = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    leading = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    num_leading = sum(parameter.kind in leading for parameter in parameters)
    if num_leading != len(positional) or num_leading + len(knobs) != len(parameters):
        shown = f"{function.__name__}{inspect.signature(function)}"
        form = f"({', '.join(positional)}, *, knob: float = 1.0)"
        raise RegistrationError(f"{subject}: {shown} must have the form {form}; knobs are optional")
    types = _annotations(subject, function)
    fields: dict[str, Any] = {"name": (Literal[name], name)}
    for knob in knobs:
        if knob.name not in types:
            raise RegistrationError(
                f"{subject}: knob {knob.name} has no type; write {knob.name}: float, for example"
            )
        reserved = hasattr(BaseModel, knob.name) or knob.name in {"name", "knobs"}
        if reserved or knob.name.startswith(("model_", "_")):
            problem = f"a knob cannot be called {knob.name}; give it another name"
            raise RegistrationError(f"{subject}: {problem}")
        default = ... if knob.default is knob.empty else knob.default
        fields[knob.name] = (types[knob.name], default)
    title = name.title().replace("_", "")
    try:
        return create_model(title, __base__=_Declared, __module__=function.__module__, **fields)
    except PydanticUserError as error:
        raise RegistrationError(
            f"{subject}: a knob has a type that a yaml cannot hold ({first_line(error)}); "
            "use bool, int, float, str, Literal, or lists of them"
        ) from error


def _check_name(table: Choices, name: str) -> None:
    kind = table.what
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RegistrationError(
            f"{kind} {name!r}: a name is lower-case letters, digits and underscores, e.g. "
            f"my_{kind.split()[-1]}"
        )
    if name in table:
        owner = table.schema(name).__module__
        built_in = owner.startswith("megatron_rl.")
        whose = "a built-in" if built_in else f"already registered by {owner}"
        raise RegistrationError(f"{kind} {name!r} is {whose}; give yours another name")


class _Declared(Named):
    """Knobs of a function: their defaults are checked like values."""

    model_config = ConfigDict(validate_default=True)


def _annotations(subject: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise RegistrationError(
            f"{subject}: an annotation of {function.__name__} is not defined ({error}); import it"
        ) from error
