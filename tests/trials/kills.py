"""SIGKILL at random moments of a run, the same command again, and the end must be that of a run
that nothing disturbed: every row of the metrics but time and memory, every exported weight, bit for
bit.

    python -m tests.trials.kills [--count 20] [--seed 1] [--only checkpoint] [--turns]

With ``--turns`` an environment answers every response up to five times.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.turns import words_of_turns, write_turns
from tests.trials import looks
from tests.trials.fault_cases import steps_done
from tests.trials.material import Material, toy
from tests.trials.place import Place, Running, marked_processes, torchrun

STEPS = 6
MOMENTS = ("rollout", "update", "sync", "checkpoint", "export")
VICTIMS = ("rank 0", "rank 1", "torchrun", "everything")
LIMIT_S = 180.0
ORPHAN_S = 15.0
MAX_STARTS = 4


@dataclass(frozen=True)
class Kill:
    """One disturbed run and what became of it."""

    number: int
    moment: str
    victim: str
    after_step: int
    starts: int
    found: tuple[str, ...]

    def line(self) -> str:
        verdict = "; ".join(self.found) if self.found else "equal"
        where = f"{self.moment:10} after step {self.after_step}, {self.victim:10}"
        return f"{self.number:3}  {where}  {self.starts} starts  {verdict}"


def command(material: Material, run_dir: Path) -> list[str]:
    """Six steps on two ranks, a checkpoint a step; in turns where the material has them."""
    more = (f"trainer.num_steps={STEPS}", "checkpoint.every_steps=1", "evaluation.every_steps=3")
    if (folder := material.folder / "turns").exists():
        return torchrun(2, words_of_turns(folder, run_dir, *more))
    return torchrun(2, toy(material, run_dir, *more))


def place_of(material: Material, folder: Path) -> Place:
    folder.mkdir(exist_ok=True)
    return Place(folder, material, LIMIT_S)


def disturbed(
    number: int, moment: str, draw: random.Random, material: Material, folder: Path, reference: Path
) -> Kill:
    """Starts, kills once at ``moment``, starts again until the run is finished, and compares."""
    place = place_of(material, folder)
    run_dir = folder / "run"
    words = command(material, run_dir)
    victim = draw.choice(VICTIMS)
    running = place.start(words)
    found: list[str] = []
    try:
        after = wait_for(moment, running, run_dir, draw, reference)
        strike(running, victim, place)
    except TimeoutError as error:
        after = steps_done(run_dir)
        found.append(f"the moment was not reached: {error}"[:300])
    running.finish(ORPHAN_S)
    left = place.left_behind()
    found += [f"left behind: {what}" for what in left]
    starts, code = 1, None
    while code != 0 and starts < MAX_STARTS:
        outcome = place.command(words)
        starts, code = starts + 1, outcome.code
    if code != 0:
        return Kill(
            number,
            moment,
            victim,
            after,
            starts,
            (*found, f"did not finish: {outcome.text[-300:]}"),
        )
    found += looks.same_metrics(reference, run_dir)
    found += looks.same_weights(reference / "export", run_dir / "export")
    return Kill(number, moment, victim, after, starts, tuple(found))


def wait_for(
    moment: str, running: Running, run_dir: Path, draw: random.Random, reference: Path
) -> int:
    """Returns at the moment, with the number of finished steps (0: before the first)."""
    if moment == "export":
        running.wait_for(lambda: exporting(run_dir))
        time.sleep(draw.uniform(0, 0.02))
    elif moment == "checkpoint":
        step = draw.randint(1, STEPS - 1)
        name = f"step_{step:06d}.tmp-partial"
        running.wait_for(lambda: (run_dir / "checkpoints" / name).exists())
        time.sleep(draw.uniform(0, 0.05))
    else:
        step = draw.randint(0, STEPS - 2)
        running.wait_for(lambda: steps_done(run_dir) > step)
        time.sleep(offset_s(moment, step + 1, draw, reference))
    return max(0, steps_done(run_dir) - 1)


def exporting(run_dir: Path) -> bool:
    """The export has begun, under whatever name it is written first."""
    return any(run_dir.glob("export*"))


def offset_s(moment: str, step: int, draw: random.Random, reference: Path) -> float:
    """Seconds after the row of the step before at which the phase is under way, by the clock of the
    undisturbed run (the checkpoint of the step before lies between the two)."""
    row = looks.metrics(reference)[step]
    begins = {
        "rollout": 0.0,
        "update": row["time/rollout_s"] + row["time/reward_s"],
        "sync": row["time/step_s"] - row["time/sync_s"],
    }[moment]
    lasts = {
        "rollout": row["time/rollout_s"],
        "update": row["time/update_s"],
        "sync": row["time/sync_s"],
    }[moment]
    return draw.uniform(0, 0.3) + begins + draw.uniform(0, lasts)


def strike(running: Running, victim: str, place: Place) -> None:
    ranks = running.ranks()
    targets = {
        "rank 0": ranks[:1],
        "rank 1": ranks[1:2],
        "torchrun": [running.process.pid],
        "everything": marked_processes(place.mark),
    }[victim]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended in this moment


def campaign(
    count: int, seed: int, folder: Path, only: str | None = None, *, turns: bool = False
) -> list[Kill]:
    """The undisturbed run, then ``count`` disturbed ones, the moments in turn; prints a line
    each."""
    material = Material(folder / "shared")
    if turns:
        material.made("turns", write_turns)
    reference = folder / "reference"
    outcome = place_of(material, folder / "undisturbed").command(command(material, reference))
    assert outcome.code == 0, f"the undisturbed run failed: {outcome.text[-2000:]}"
    wrong = looks.trained(reference, STEPS)
    assert not wrong, wrong
    draw = random.Random(seed)
    kills = []
    for number in range(1, count + 1):
        moment = only or MOMENTS[(number - 1) % len(MOMENTS)]
        kill = disturbed(number, moment, draw, material, folder / f"kill_{number}", reference)
        print(kill.line(), flush=True)
        kills.append(kill)
    return kills


def options_of(program: str, text: str | None, count: int) -> argparse.ArgumentParser:
    """The command line of a campaign."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.trials.{program}",
        description=text,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    where = "where it runs; kept (default: a temporary one)"
    parser.add_argument("--folder", type=Path, help=where)
    return parser


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trials.") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = options_of("kills", __doc__, 20)
    parser.add_argument("--only", choices=MOMENTS)
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args(argv)
    with folder_of(options) as folder:
        kills = campaign(options.count, options.seed, folder, options.only, turns=options.turns)
    equal = [kill for kill in kills if not kill.found]
    moments = Counter(kill.moment for kill in kills)
    print(f"{len(equal)} of {len(kills)} ends are bit-equal; moments: {dict(moments)}")
    return int(len(equal) < len(kills))


if __name__ == "__main__":
    sys.exit(main())
