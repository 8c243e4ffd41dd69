"""Messages between programs as plain data with a schema: JSON, checked as it is read.

A pickle runs any program that its sender chooses. Between a trainer and the workers of a server
only text, numbers and lists are sent.
"""

from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

Schema = Any  # a type that pydantic knows: ``tuple[str, ...]``, a NamedTuple, a dataclass, a union


class MalformedMessageError(RuntimeError):
    """A message is not of the schema. The text says what was sent and what was expected."""


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
