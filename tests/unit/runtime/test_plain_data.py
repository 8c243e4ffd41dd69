"""What is read is of the schema, or an error that names the sender; a pickle is never one."""

import pickle
from typing import NamedTuple

import pytest

from megatron_rl.runtime.plain_data import MalformedMessageError, decoded, encoded


class Place(NamedTuple):
    row: int
    shape: tuple[int, ...]


SAMPLES = (
    (None, int | None),
    ([Place(3, (4, 2)), Place(-1, ())], list[Place]),
    ([(Place(0, (1,)), "ab\N{SNOWMAN}")], list[tuple[Place, str]]),
    ({"a": "b"}, dict[str, str]),
    (0.1 + 0.2, float),
)


@pytest.mark.parametrize(("value", "schema"), SAMPLES)
def test_a_value_comes_back_in_its_own_types(value, schema):
    back = decoded(encoded(value, schema), schema, "a peer")
    assert back == value and type(back) is type(value)
    assert not isinstance(value, list) or [type(item) for item in back] == [
        type(item) for item in value
    ]


@pytest.mark.parametrize(
    ("message", "schema", "words"),
    [
        (b"[1, 2", list[int], "Invalid JSON"),
        (b'["1"]', list[int], "rank 3 .*: 0: .*valid integer"),
        (b"[[1, [2.5]]]", list[Place], "valid integer"),
        (b"1", bool, "valid boolean"),
    ],
)
def test_what_is_not_of_the_schema_names_its_sender(message, schema, words):
    with pytest.raises(MalformedMessageError, match=words):
        decoded(message, schema, "rank 3")


def test_a_pickle_is_not_run():
    ran = []

    class Bomb:
        def __reduce__(self):
            return ran.append, ("ran",)

    with pytest.raises(MalformedMessageError):
        decoded(pickle.dumps(Bomb()), list[int], "rank 3")
    assert not ran
