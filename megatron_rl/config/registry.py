"""A function becomes a choice of the configuration; its keyword-only arguments are the knobs.

A name in a yaml is looked up in the tables of ``config/method.py`` and ``config/hooks.py``. The
rooms that own the functions (``loss/register.py``, ``rollouts/hooks.py``) describe them here, the
package's own and those of plug-ins alike.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from megatron_rl.config.pieces import Named
from megatron_rl.errors import RegistrationError, first_line

NAME = re.compile(r"[a-z][a-z0-9_]*")


def register_piece(
    kind: str,
    table: dict[str, type[Named]],
    name: str,
    function: Callable[..., Any],
    positional: Sequence[str],
) -> type[Named]:
    """Adds ``name`` to ``table``, with the knobs that ``function`` declares.

    Args:
        kind: what it is, for messages: ``"estimator"``.
        positional: the arguments the caller passes, by their usual names; the function may call
            them otherwise.

    Raises:
        RegistrationError: the name is taken, or the signature is not of this form.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RegistrationError(
            f"{kind} {name!r}: a name is lower-case letters, digits and underscores, e.g. "
            f"my_{kind.split()[-1]}"
        )
    refuse_taken(kind, name, table)
    piece = knob_class(f"{kind} {name}", name, function, positional)
    piece.__module__ = function.__module__
    table[name] = piece
    return piece


def refuse_taken(kind: str, name: str, table: Mapping[str, Any]) -> None:
    """Raises RegistrationError when ``table`` has ``name`` already, and says whose it is."""
    if name not in table:
        return
    owner = getattr(table[name], "__module__", "")
    built_in = owner.startswith("megatron_rl.")
    whose = "a built-in" if built_in else f"already registered by {owner}"
    raise RegistrationError(f"{kind} {name!r} is {whose}; give yours another name")


def knob_class(
    subject: str, name: str, function: Callable[..., Any], positional: Sequence[str]
) -> type[Named]:
    """A strict schema with one field for each keyword-only argument of ``function``.

    Example: ``def f(evidence, *, limit: float = 2.0)`` under the name ``"clipped"`` gives a schema
    with ``name = "clipped"`` and ``limit: float = 2.0``; an argument without a default must be set
    in the yaml.

    Raises:
        RegistrationError: names ``subject`` and the argument that cannot be a knob.
    """
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
        _check_knob_name(subject, knob.name)
        default = ... if knob.default is knob.empty else knob.default
        fields[knob.name] = (types[knob.name], default)
    try:
        return create_model(name.title().replace("_", ""), __base__=_Declared, **fields)
    except PydanticUserError as error:
        raise RegistrationError(
            f"{subject}: a knob has a type that a yaml cannot hold ({first_line(error)}); "
            "use bool, int, float, str, Literal, or lists of them"
        ) from error


def _check_knob_name(subject: str, knob: str) -> None:
    reserved = hasattr(BaseModel, knob) or knob in {"name", "knobs", *Named.__class_vars__}
    if reserved or knob.startswith(("model_", "_")):
        raise RegistrationError(f"{subject}: a knob cannot be called {knob}; give it another name")


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
