"""How long a request may take, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.rollouts.backends.timeouts import RequestTimeouts


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def answer(
    patience: RequestTimeouts, time: Time, seconds: float, num_tokens: int, max_tokens: int = 4000
) -> None:
    with patience.waiting("quick", max_tokens) as answered:
        time.now_s += seconds
        answered(num_tokens)


def test_the_limit_is_that_of_a_full_response_by_the_median() -> None:
    time = Time()
    patience = RequestTimeouts(4.0, time)
    assert patience.limit_s(4000) is None and patience.overdue() == {}
    answer(patience, time, 5.0, 100)  # 200 s for 4,000 tokens
    assert patience.limit_s(4000) == 800
    answer(patience, time, 90.0, 1)  # it has waited for its turn
    answer(patience, time, 10.0, 400)
    assert patience.limit_s(4000) == 800, "the median of 100, 200 and 360,000 s"
    for _ in range(4):
        answer(patience, time, 0.1, 4000)
    assert patience.limit_s(4000) == 60, "never less than a minute"


def test_each_request_has_the_limit_of_its_own_length() -> None:
    """Stages of short responses, then an evaluation of long ones: 4,000 tokens take 40 s, 32,000 in
    an evaluation 320 s, and more where requests stand in line."""
    time = Time()
    patience = RequestTimeouts(4.0, time)
    for _ in range(256):
        answer(patience, time, 40.0, 4000)
    assert (patience.limit_s(4000), patience.limit_s(32000)) == (160, 1280)
    with patience.waiting("short", 4000), patience.waiting("long", 32000, in_line=True):
        time.now_s += 161
        assert list(patience.overdue()) == ["short"]
        time.now_s += 1120
        assert sorted(patience.overdue()) == ["long", "short"]


def test_who_keeps_a_request_too_long_is_named_until_it_is_gone() -> None:
    time = Time()
    patience = RequestTimeouts(4.0, time)
    with patience.waiting("silent", 4000):
        time.now_s += 1000
        assert patience.overdue() == {}, "nobody has answered"
        answer(patience, time, 5.0, 100)
        assert list(patience.overdue()) == ["silent"]
    assert patience.overdue() == {}


def test_a_server_that_answers_an_evaluation_keeps_nobody_waiting_too_long() -> None:
    time = Time()
    patience = RequestTimeouts(4.0, time)
    answer(patience, time, 5.0, 100)  # the limit is 800 s
    with (
        patience.waiting("busy", 4000),
        patience.waiting("busy", 4000, in_line=True) as answered,
        patience.waiting("silent", 4000, in_line=True),
    ):
        time.now_s += 600
        answered(4000)  # 600 s for 4,000 tokens: the median is 400 s, the limit 1,600 s
        time.now_s += 1400
        assert list(patience.overdue()) == ["silent"]
        time.now_s += 201
        assert sorted(patience.overdue()) == ["busy", "silent"]


def test_an_error_ends_the_wait_and_tells_nothing_of_answers() -> None:
    patience = RequestTimeouts(4.0, Time())
    with pytest.raises(ConnectionError), patience.waiting("dead", 4000):
        raise ConnectionError
    assert patience.limit_s(4000) is None and patience.overdue() == {}


def test_without_a_factor_there_is_no_end() -> None:
    time = Time()
    patience = RequestTimeouts(None, time)
    answer(patience, time, 5.0, 100)
    with patience.waiting("silent", 4000):
        time.now_s += 1e6
        assert patience.overdue() == {}
