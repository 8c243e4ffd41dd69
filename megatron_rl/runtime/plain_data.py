"""Messages between programs as plain data with a schema: JSON, checked as it is read.

A pickle runs whatever program its sender likes. Between a trainer and the workers of a server
nothing travels that is more than text, numbers and lists.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

Schema = Any  # a type that pydantic knows: ``tuple[str, ...]``, a NamedTuple, a dataclass, a union


class MalformedMessageError(RuntimeError):
    """Somebody sent what is not of the schema. The message says what, and what was wanted."""


@cache
def _adapter(schema: Schema) -> TypeAdapter:
    return TypeAdapter(schema)


def encoded(value: Any, schema: Schema) -> bytes:
    """``value`` of this schema as JSON."""
    return _adapter(schema).dump_json(value, warnings="error")


def decoded(message: bytes, schema: Schema, sender: str) -> Any:
    """The inverse.

    Raises:
        MalformedMessageError: not JSON, or not of the schema; names ``sender``.
    """
    try:
        return _adapter(schema).validate_json(message, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the message"
        raise MalformedMessageError(
            f"{sender} sent a message that is not of the schema: {place}: {first['msg']}"
        ) from error
