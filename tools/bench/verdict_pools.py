"""Judging in worker processes: the package's pool beside pebble's ProcessPool, in turns.

    PYTHONPATH=PEBBLE python tools/bench/verdict_pools.py

Both run the package's own ``Judge`` (same verifiers, timers and limits) in two workers that have
imported everything. pebble: one call of ``map`` with chunks as the package's pool makes them, and
one task a response, which is what lets it stop the one that hangs.

verdicts   microseconds of a verdict, of a batch of honest answers; processor time of all processes
hanging    seconds of a batch with one response that cannot be interrupted, above the time limit
start      seconds until the first verdict, and MiB of the workers (PSS) behind the batch
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pebble
from gpu_model import table
from machine import Watch, description, in_turns, spread

from megatron_rl.plugins import load_plugins
from megatron_rl.rewards.base import Options, Task
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.messages import Setup
from megatron_rl.rewards.pool import WorkerPool

WORKERS = 2
TIMEOUT_S = 1.0
GRACE_S = 1.0
OPTIONS = Options(False, TIMEOUT_S, 4 << 30, "rlimits_only")
_judge: Judge | None = None


STUCK = '''
from megatron_rl.rewards.base import Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier


@register_verifier("stuck")
class Stuck(Verifier):
    """One instruction of minutes: no timer inside the process ends it."""

    reads_prompt = False

    def verify(self, task, answer):
        if answer == "hang":
            return Verdict(float(sum(range(10**12)) == 0))
        return Verdict(float(answer == task.answer))
'''
PLUGIN = Path(tempfile.mkdtemp()) / "stuck.py"
PLUGIN.write_text(STUCK)


def setup(name: str) -> Setup:
    return Setup((str(PLUGIN),), (name,), OPTIONS, None, None, None)


def prepare(name: str) -> None:
    global _judge
    load_plugins(setup(name).plugins)
    _judge = Judge(setup(name))


def judge(item: tuple) -> dict:
    return _judge.judge(*item)


def pebble_pool(name: str) -> pebble.ProcessPool:
    return pebble.ProcessPool(max_workers=WORKERS, initializer=prepare, initargs=(name,))


def by_pebble(pool: pebble.ProcessPool, items: list, chunk: int) -> list:
    """``chunk`` > 1: a limit of time is of a whole chunk, whose verdicts are lost together."""
    limit = (TIMEOUT_S + GRACE_S) * chunk
    results = pool.map(judge, items, timeout=limit, chunksize=chunk).result()
    replies = []
    while True:
        try:
            replies.append(next(results))
        except StopIteration:
            return replies
        except (TimeoutError, pebble.ProcessExpired) as error:
            replies.append({"problem": str(error)})


def tree(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *tree(child)]
    return found


def pss_mib() -> float:
    total = 0
    for process in tree(os.getpid()):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += next(int(row.split()[1]) for row in text.splitlines() if "Pss:" in row)
    return total / 1024


def ticks() -> float:
    """Processor seconds of this process and its living descendants."""
    total = time.process_time()
    for process in tree(os.getpid()):
        with contextlib.suppress(OSError):
            columns = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")
    return total


def timed(run: Callable[[], list], count: int) -> tuple[float, float]:
    cpu = ticks()
    start = time.perf_counter()
    replies = run()
    seconds = time.perf_counter() - start
    assert len(replies) == count, len(replies)
    return seconds, ticks() - cpu


def started(make: Callable[[], Callable[[list], list]], items: list) -> tuple[float, Callable]:
    start = time.perf_counter()
    run = make()
    run(items[:1])
    return time.perf_counter() - start, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    watch = Watch()
    rows = []
    for name, answer in (("exact", "12"), ("math", r"so \boxed{\frac{1}{3}}")):
        task = Task("toy:1", "12" if name == "exact" else r"\frac{1}{3}", "toy")
        items = [(name, task, answer)] * options.responses
        ways: dict[str, Callable[[], Callable]] = {
            "ours": lambda name=name: (
                lambda some, pool=WorkerPool(setup(name), num_workers=WORKERS, step_timeout_s=600): (
                    pool.judge(some)
                )
            ),
            "pebble, a task a response": lambda name=name: partial(
                by_pebble, pebble_pool(name), chunk=1
            ),
            "pebble, 32 a task": lambda name=name: partial(by_pebble, pebble_pool(name), chunk=32),
        }
        runs = {}
        starts = {}
        memory = {}
        for way, make in ways.items():
            before = pss_mib()
            starts[way], runs[way] = started(make, items)
            runs[way](items)
            memory[way] = pss_mib() - before
        results = in_turns(
            {way: partial(timed, partial(run, items), len(items)) for way, run in runs.items()},
            options.rounds,
        )
        for way, taken in results.items():
            scale = 1e6 / len(items)
            rows.append(
                {
                    "verifier": name,
                    "pool": way,
                    "us a verdict": spread([one[0] * scale for one in taken]).text(0),
                    "processor us": spread([one[1] * scale for one in taken]).text(0),
                    "first verdict s": f"{starts[way]:.2f}",
                    "MiB of workers": f"{memory[way]:.0f}",
                }
            )
    hanging = []
    task = Task("toy:1", "12", "toy")
    items = [("stuck", task, "12")] * 200
    items[100] = ("stuck", task, "hang")
    pool = WorkerPool(setup("stuck"), num_workers=WORKERS, step_timeout_s=600)
    other = pebble_pool("stuck")
    runs = {
        "ours": pool.judge,
        "pebble, a task a response": partial(by_pebble, other, chunk=1),
        "pebble, 32 a task": partial(by_pebble, other, chunk=32),
    }
    for run in runs.values():
        run(items[:2])
    replies = {way: run(items) for way, run in runs.items()}
    for way, run in runs.items():
        times = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            run(items)
            times.append(time.perf_counter() - start)
        lost = sum(reply.get("problem") is not None for reply in replies[way])
        hanging.append(
            {
                "pool": way,
                "s of 200 with one that hangs": spread(times).text(),
                "without a verdict": f"{lost} (of {len(replies[way])} replies)",
            }
        )
    print(
        f"{description()}; pebble {pebble.__version__ if hasattr(pebble, '__version__') else ''}; {watch.load()}"
    )
    print(f"\n{table(rows)}\n\n{table(hanging)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
