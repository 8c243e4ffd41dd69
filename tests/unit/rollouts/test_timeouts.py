"""How long a request may take, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.rollouts.backends.failures import RequestTimeouts


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def answer(
    timeouts: RequestTimeouts, time: Time, seconds: float, num_tokens: int, max_tokens: int = 4000
) -> None:
    with timeouts.waiting("quick", max_tokens) as answered:
        time.now_s += seconds
        answered(num_tokens)


def test_the_limit_is_that_of_a_full_response_by_the_median() -> None:
    time = Time()
    timeouts = RequestTimeouts(4.0, time)
    assert timeouts.limit_s(4000) is None and timeouts.overdue() == {}
    answer(timeouts, time, 5.0, 100)  # 200 s for 4,000 tokens
    assert timeouts.limit_s(4000) == 800
    answer(timeouts, time, 90.0, 1)  # it has waited for its turn
    answer(timeouts, time, 10.0, 400)
    assert timeouts.limit_s(4000) == 800, "the median of 100, 200 and 360,000 s"
    for _ in range(4):
        answer(timeouts, time, 0.1, 4000)
    assert timeouts.limit_s(4000) == 60, "never less than a minute"


def test_each_request_has_the_limit_of_its_own_length() -> None:
    """Stages of short responses, then an evaluation of long ones: 4,000 tokens take 40 s, 32,000
    take 320 s."""
    time = Time()
    timeouts = RequestTimeouts(4.0, time)
    for _ in range(256):
        answer(timeouts, time, 40.0, 4000)
    assert (timeouts.limit_s(4000), timeouts.limit_s(32000)) == (160, 1280)
    with timeouts.waiting("short", 4000), timeouts.waiting("long", 32000):
        time.now_s += 161
        assert list(timeouts.overdue()) == ["short"]
        time.now_s += 1120
        assert sorted(timeouts.overdue()) == ["long", "short"]


def test_who_keeps_a_request_too_long_is_named_until_it_is_gone() -> None:
    time = Time()
    timeouts = RequestTimeouts(4.0, time)
    with timeouts.waiting("silent", 4000):
        time.now_s += 1000
        assert timeouts.overdue() == {}, "nobody has answered"
        answer(timeouts, time, 5.0, 100)
        assert list(timeouts.overdue()) == ["silent"]
    assert timeouts.overdue() == {}


def test_an_error_ends_the_wait_and_tells_nothing_of_answers() -> None:
    timeouts = RequestTimeouts(4.0, Time())
    with pytest.raises(ConnectionError), timeouts.waiting("dead", 4000):
        raise ConnectionError
    assert timeouts.limit_s(4000) is None and timeouts.overdue() == {}


def test_without_a_factor_there_is_no_end() -> None:
    time = Time()
    timeouts = RequestTimeouts(None, time)
    answer(timeouts, time, 5.0, 100)
    with timeouts.waiting("silent", 4000):
        time.now_s += 1e6
        assert timeouts.overdue() == {}
