"""What a benchmark says about the machine it ran on, and about its repeats."""

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from tests.launch import REPO

specification = importlib.util.spec_from_file_location(
    "bench_machine", REPO / "tools/bench/machine.py"
)
machine = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = machine  # a dataclass looks its module up
specification.loader.exec_module(machine)

BURN = "import time\nwhile time.process_time() < {}: pass"


def test_busy_time_leaves_out_idle_and_waiting():
    tick = os.sysconf("SC_CLK_TCK")
    text = f"cpu  {3 * tick} {1 * tick} {2 * tick} 500 600 {tick} 0 0 {tick} 0\ncpu0 9 9 9 9\n"
    assert machine.busy_seconds(text) == 7


def test_the_benchmarks_own_work_is_no_load_and_that_of_others_is():
    """Half a core of a machine with one core: too much, unless it is the benchmark's."""
    load = machine.Load(cores=1, average=(0.0, 0.0, 0.0), before=0.0, meanwhile=0.5)
    assert load.is_high and str(load).endswith("MEASURED UNDER LOAD")
    assert not machine.Load(8, (9.0, 9.0, 9.0), 0.5, 0.5).is_high
    assert machine.Load(8, (0.0, 0.0, 0.0), 1.0, 0.0).is_high
    assert not machine.Load(2, (9.0, 9.0, 9.0), None, None).is_high
    assert "an unknown number" in str(machine.Load(2, (9.0, 9.0, 9.0), None, None))


@pytest.mark.skipif(not machine.STAT.is_file(), reason="no /proc/stat")
def test_a_child_that_burns_is_counted_until_it_is_known_as_ones_own():
    watch = machine.Watch(listen_s=0.1)
    start, before = time.monotonic(), watch.own
    subprocess.run([sys.executable, "-c", BURN.format(1.0)], check=True)
    known = watch.load().meanwhile
    watch.own = machine.own_seconds()  # as if it were the child of another
    assert watch.own - before >= 1.0
    unknown = watch.load().meanwhile
    # The cores that the child kept busy: a second of them, however long the machine took for it.
    assert (unknown - known) * (time.monotonic() - start) > 0.9


def test_spread_by_hand():
    assert machine.spread([5, 1, 4, 2, 3]) == machine.Spread(3, 2, 4)
    assert machine.spread([7.0]) == machine.Spread(7.0, 7.0, 7.0)
    assert machine.spread([1, 2]).text() == "1.50 (1.25-1.75)"
