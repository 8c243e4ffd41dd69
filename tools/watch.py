"""Shows how a run goes, in the terminal, until it ends; over ssh, too.

    python tools/watch.py runs/quickstart_cpu

It only reads the run's folder. Ctrl-C ends it, not the run; into a file or a pipe it prints once.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.errors import shortened
from megatron_rl.reporting.metrics_file import series
from megatron_rl.reporting.report import HEADLINES
from megatron_rl.run.files import METRICS, REQUEUE, SAMPLES
from megatron_rl.runtime.display import duration
from megatron_rl.runtime.guard import lock
from megatron_rl.runtime.guard.first_failure import FAILED_HOST
from tools.reporting.runs import Run, read_run
from tools.reporting.samples import as_sample

_BARS = "".join(map(chr, range(0x2581, 0x2589)))  # an eighth of a line high to a whole one
_CURVE_CHARACTERS = 40
_RECENT_STEPS = 30
_SAMPLE_BYTES = 1 << 16  # from the end of the file
_SAMPLE_CHARACTERS = 600
_LOOK_SHARE = 0.1  # of the time: what this takes is taken from the run where it is watched


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when the run has ended or Ctrl-C was pressed, 1 on wrong input."""
    parser = parser_of(__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    between = "between looks (default 2)"
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help=between)
    options = parser.parse_args(argv)
    try:
        with suppress(KeyboardInterrupt):
            watch(options.run_dir, options.every, Console(highlight=False))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def watch(run_dir: Path, every_s: float, console: Console) -> None:
    """Raises ValueError as ``look`` does."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            shown, is_over = look(run_dir)
            live.update(shown, refresh=True)
            if is_over or not console.is_terminal:
                return
            time.sleep(max(every_s, (time.monotonic() - begin) / _LOOK_SHARE))


def look(run_dir: Path) -> tuple[RenderableType, bool]:
    """What to show, and whether the run has ended.

    Raises:
        ValueError: no run has begun there, or its files are damaged.
    """
    holder = lock.holder(run_dir)
    metrics = run_dir / METRICS
    if not metrics.is_file() or not metrics.stat().st_size:
        if holder is None:
            raise ValueError(f"{run_dir}: no run has begun here; give the run_dir of a training")
        return Text(f"{run_dir}: starting ({holder})"), False
    run = read_run(run_dir, run_dir.resolve().name, [])
    state, is_over = _state(run, holder)
    table = Table("metric", "first", "last", "curve", box=None, header_style="dim")
    for key, (name, form) in HEADLINES.items():
        _, values = series(run.rows, key)
        if values:
            ends = (form.format(values[0]), form.format(values[-1]))
            # As Text: rich would take the brackets of a unit for markup.
            table.add_row(Text(name), *ends, curve(values, _CURVE_CHARACTERS))
    steps = f"  {run.method}  step {run.steps_done}/{run.steps_wanted}  {state}\n"
    head = Text.assemble((run.name, "bold"), steps)
    return Group(head, table, *_newest_sample(run_dir)), is_over


def _state(run: Run, holder: str | None) -> tuple[str, bool]:
    age_s = time.time() - (run.folder / METRICS).stat().st_mtime
    last = f"last row {duration(max(age_s, 0))} ago"
    if holder is not None:
        _, seconds = series(run.rows[-_RECENT_STEPS:], "time/step_s")
        left = duration((run.steps_wanted - run.steps_done) * fmean(seconds or [0]))
        return f"running, about {left} left, {last} ({holder})", False
    if (run.folder / REQUEUE).exists():
        return "stopped on request: start it again with resume=auto", True
    if (run.folder / FAILED_HOST).exists():
        return f"failed, {last}", True
    # The other may run where locks are not seen from here, so that this is not its end.
    unseen = f"no process is seen to hold the folder, {last}"
    return ("finished", True) if run.finished else (unseen, False)


def curve(values: Sequence[float], width: int) -> str:
    """Bars between the least and the largest value, the mean of as many values each.

    Example: ``[0, 1, 2, 7]`` over two characters gives the means 0.5 and 4.5: a low and a high bar.
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [fmean(values[edges[i] : edges[i + 1]]) for i in range(count)]
    low = min(means)
    span = max(means) - low or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def _newest_sample(run_dir: Path) -> list[Text]:
    path = run_dir / SAMPLES
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SAMPLE_BYTES))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    # The last one may be under way, the first is cut.
    for sample in filter(None, map(as_sample, reversed(lines))):
        title = f"\nstep {sample['step']}, reward {sample.get('reward')}: "
        texts = (_plain(str(sample.get(key))) for key in ("prompt_text", "response"))
        return [Text(title, "dim"), *map(Text, texts)]
    return []


def _plain(text: str) -> str:
    """A response may hold sequences that a terminal would obey."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    return shortened(clean.strip(), _SAMPLE_CHARACTERS)


if __name__ == "__main__":
    sys.exit(main())
