"""Whole runs with their rollouts on two vLLM servers, beside the same runs with engines inside the
trainer: held-out accuracy, seconds of a step, cores in use.

    python tools/bench/served_runs.py --model TOY --seeds 1 2 3
    python tools/bench/served_runs.py --model LAB/model --sources colocated servers turns \\
        --config-dir examples/claims/lab/conf -- experiment=lab data.train=LAB/train.jsonl ...

TOY is what tools/make_toy_model.py wrote, LAB what examples/claims/lab/make.py wrote. Each seed
runs once with every source, one after the other, so that a change of the machine's load meets all;
all of a seed have the same prompts, order and first weights. ``servers``: one update behind,
sampling while the policy trains; ``turns``: servers and trainer take turns (staleness 0), which
samples from the same weights as ``colocated``. Words after ``--`` are overrides for all. The first
``--warmup`` steps do not count in seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import Watch, description, own_seconds, spread
from whole_runs import ENVIRONMENT, LIMIT_S, add_run_options, metrics, parsed, torchrun

NUM_SERVERS = 2
# What staleness needs; the same correction in all, so that nothing else differs.
CORRECTED = (
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
)
SOURCES = {
    "colocated": (),
    "servers": ("source=servers", "rollout.tensor=1", "source.staleness=1"),
    "turns": ("source=servers", "rollout.tensor=1", "source.staleness=0"),
}


@dataclass(frozen=True)
class Run:
    """``steps``: the rows of training; ``held_out``: the last evaluation, by metric; ``cores``: how
    many the trainer and its servers kept busy, from start to end."""

    steps: list[dict[str, float]]
    held_out: dict[str, float]
    cores: float

    @property
    def seconds(self) -> list[float]:
        return [row["time/step_s"] for row in self.steps]


def run(source: str, words: Sequence[str], config_dir: Path | None, folder: Path) -> Run:
    """One run in ``folder``, which also takes the output of its programs."""
    own = [f"--config-dir={config_dir}"] if config_dir else []
    own += [*words, *CORRECTED, *SOURCES[source], f"run_dir={folder}"]
    folder.mkdir()
    before, started = own_seconds(), time.monotonic()
    wall = 0.0
    programs: list[subprocess.Popen] = []

    def start(name: str, program: Sequence[str]) -> subprocess.Popen:
        with (folder / f"{name}.log").open("w") as log:
            programs.append(
                subprocess.Popen(
                    [sys.executable, "-m", *program, *own], env=ENVIRONMENT, stdout=log, stderr=log
                )
            )
        return programs[-1]

    try:
        for number in range(NUM_SERVERS if source != "colocated" else 0):
            start(f"server{number}", ["megatron_rl.serve"])
        trainer = start("trainer", torchrun(2))
        # A server ends when it is told to: one that has ended alone has failed.
        while all(program.poll() is None for program in programs) and wall < LIMIT_S:
            time.sleep(0.1)
            wall = time.monotonic() - started
        failed = trainer.poll() != 0
    finally:
        end(programs)
    if failed:
        tails = [f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))]
        sys.exit("\n".join([f"{source}: a program failed, or no end within {LIMIT_S} s", *tails]))
    return read(folder, (own_seconds() - before) / wall)


def end(programs: Sequence[subprocess.Popen]) -> None:
    """Each ends its own children when it is told to end."""
    for program in programs:
        program.terminate()
    for program in programs:
        try:
            program.wait(60)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def read(folder: Path, cores: float) -> Run:
    rows = metrics(folder)
    evaluated = [row for row in rows if "eval/accuracy" in row]
    held_out = {key: value for key, value in evaluated[-1].items() if key.startswith("eval/")}
    return Run([row for row in rows if row["step"]], held_out, cores)


def row_of(name: str, seed: int, run: Run, warmup: int) -> str:
    """Of one run: accuracies in %, the median step in seconds, and where they went."""
    kept = run.steps[warmup:]
    if not kept:
        sys.exit(f"--warmup {warmup}: the run has {len(run.steps)} steps; give fewer")
    seconds = spread(run.seconds[warmup:])
    waits, updates = (
        spread([row[f"time/{phase}_s"] for row in kept]).median for phase in ("rollout", "update")
    )
    longest = spread([row["rollout/response_tokens_max"] for row in kept]).median
    mean = spread([row["rollout/response_tokens_mean"] for row in kept]).median
    accuracy = f"{run.held_out['eval/accuracy']:.1%}"
    return (
        f"| {name} | {seed} | {accuracy} | {seconds.median:.3f} |"
        f" {seconds.low:.3f}-{seconds.high:.3f} | {waits:.3f} | {updates:.3f} |"
        f" {mean:.1f} / {longest:.0f} | {run.cores:.2f} |"
    )


def summary(runs: dict[str, list[Run]], warmup: int) -> list[str]:
    """By source: accuracy over the seeds, and the ratio of its median step to the first one's."""
    first = next(iter(runs))
    lines = []
    for name, found in runs.items():
        accuracy = spread([run.held_out["eval/accuracy"] for run in found])
        medians = [spread(run.seconds[warmup:]).median for run in found]
        others = [spread(run.seconds[warmup:]).median for run in runs[first]]
        ratios = [other / own for own, other in zip(medians, others, strict=True)]
        lines.append(
            f"{name}: accuracy {accuracy.median:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%});"
            f" {spread(ratios).text()} times as fast as {first}, median (quartiles) of"
            f" {len(found)} seeds"
        )
    return lines


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=["colocated", "servers"])
    parser.add_argument("--config-dir", type=Path, help="as of the trainer")
    parser.add_argument("--keep", type=Path, help="new folder for the runs; else they are deleted")
    options = parsed(parser)
    if options.keep and options.keep.exists():
        parser.error(f"--keep {options.keep}: exists; give a new folder")
    return options


def main() -> None:
    options = parsed_options()
    watch = Watch()
    runs: dict[str, list[Run]] = {name: [] for name in options.sources}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        home = options.keep or Path(scratch) / "runs"
        home.mkdir(parents=True)
        for seed in options.seeds:
            words = [*options.overrides, f"model.path={options.model}", f"seed={seed}"]
            for name in options.sources:
                done = run(name, words, options.config_dir, home / f"{name}-{seed}")
                runs[name].append(done)
                rows.append(row_of(name, seed, done, options.warmup))
                print(rows[-1], file=sys.stderr, flush=True)
    print(f"{description()}; {watch.load()}.\n")
    print(
        "| source | seed | held-out accuracy | median s/step | quartiles | waits for responses |"
        " update | tokens of a response, mean / longest | busy cores |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print(*rows, "", *summary(runs, options.warmup), sep="\n")


if __name__ == "__main__":
    main()
