"""What a person sees: phases, how far generation has come, the time left."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_rl.reporting.sinks import ConsoleLine
from megatron_rl.runtime.display import Display, Progress, duration, in_words
from tests.launch import REPO


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=200, soft_wrap=True, highlight=False
    )


def text(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_a_log_gets_a_line_when_a_phase_begins_and_one_when_it_took_long():
    shown, watch = console(), Watch()
    display = Display(console=shown, clock=watch)
    with display.phase("building [the] policy"):
        watch.now += 3
    with display.phase("building the engine"):
        watch.now += 75
    with display.phase("step 1: generating", announced=False):
        watch.now += 500
    lines = [
        "building [the] policy ...",
        "building the engine ...",
        "building the engine: 1 min 15 s",
    ]
    assert text(shown).splitlines() == lines


def test_a_terminal_shows_the_phase_and_its_progress_in_one_live_line():
    shown, watch = console(terminal=True), Watch()
    display = Display(console=shown, clock=watch)
    with display.phase("building"):
        pass
    with display.phase("step 1: generating", announced=False):
        report = display.generating("step 1")
        watch.now += 2
        report(Progress(4, 8, 100, 30))
        watch.now += 2
        report(Progress(8, 8, 300, 0))
    assert " building\n" in text(shown)
    assert "step 1: 8 of 8 responses, 75 tokens/s, 4 s" in text(shown)
    assert "..." not in text(shown)


def test_a_long_generation_says_how_far_it_is_every_half_minute_in_a_log():
    shown, watch = console(), Watch()
    report = Display(console=shown, clock=watch).generating("step 7")
    for second in range(1, 66):
        watch.now = 100.0 + second
        report(Progress(second, 100, 50 * second, 7))
    assert text(shown).splitlines() == [
        "step 7: 30 of 100 responses, 50 tokens/s, longest 7, 30 s",
        "step 7: 60 of 100 responses, 50 tokens/s, longest 7, 1 min 00 s",
    ]


def test_the_age_of_what_is_under_way_is_told():
    assert in_words(Progress(4, 8, 100, 0, age=1), 2.0) == (
        "4 of 8 responses, 50 tokens/s, oldest 1 update"
    )
    words = in_words(Progress(4, 8, 100, 30, age=2), 2.0)
    assert words == "4 of 8 responses, 50 tokens/s, longest 30, oldest 2 updates"


def test_other_ranks_show_nothing():
    shown, watch = console(), Watch()
    display = Display(shown=False, console=shown, clock=watch)
    with display.phase("building"):
        watch.now += 100
    display.line("x")
    display.generating("step 1")(Progress(4, 4, 4, 0))
    assert text(shown) == ""


def test_an_error_in_a_phase_passes_and_the_live_line_is_gone():
    shown = console(terminal=True)
    display = Display(console=shown)
    with pytest.raises(KeyError), display.phase("building"):
        raise KeyError("x")
    with display.phase("again"):
        pass


def test_the_time_left_is_that_of_the_steps_as_they_took():
    shown, watch = console(), Watch()
    line = ConsoleLine(10, shown, watch)
    for step, seconds in ((0, 0), (1, 10), (2, 20), (10, 30)):
        watch.now += seconds
        line({"step": step})
    first, second, third, last = text(shown).splitlines()
    assert "left" not in first
    assert second.endswith("left 1 min 30 s")  # 9 steps of 10 s
    assert third.endswith("left 2 min 00 s")  # 8 steps of 15 s
    assert "left" not in last


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (0.4, 59.4, 61, 3599, 3600, 7500)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "59 min 59 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_a_reader_that_goes_away_does_not_end_the_run():
    program = (
        "import logging, sys\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from megatron_rl.runtime.display import Display\n"
        "display = Display()\n"
        "for number in range(20_000):\n"
        "    display.line(f'line {number}')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    ) as run:
        assert run.stdout.readline() == b"line 0\n"
        run.stdout.close()
        assert run.stderr.read().count(b"the reader of stdout is gone: the run continues") == 1
        assert run.wait(60) == 0
