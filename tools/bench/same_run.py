"""One run of training by several commits, in turns: are its metrics the same bits, and how long is
a step.

    python tools/bench/same_run.py --commits OLD HEAD --model TOY -- trainer.num_steps=25

Before a refactor, or behind it: TOY is what tools/make_toy_model.py wrote, words after ``--`` are
overrides, which every commit must know (without an ``experiment=`` that of the quickstart). Each
commit is checked out into a folder of its own and runs with the Python of this program. Metrics of
each step are compared with those of the first commit, but for seconds, throughput and memory;
metrics that only one of two commits has are named. The first ``--warmup`` steps do not count in
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import Watch, description, spread

REPO = Path(__file__).resolve().parent.parent.parent
MEASURED = ("time/", "throughput/", "memory/")
LIMIT_S = 1800  # of one run
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
Rows = list[dict[str, float]]  # of each step, and of evaluations


def check_out(commit: str, folder: Path) -> None:
    """The files of ``commit`` in a new ``folder``; ends the program where there is no such."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", REPO, "archive", commit], capture_output=True)
    if archive.returncode:
        sys.exit(f"--commits {commit}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def run(tree: Path, run_dir: Path, nproc: int, words: Sequence[str]) -> Rows:
    """The metrics of one run, a row a step."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += [f"--nproc-per-node={nproc}", "-m", "megatron_rl.train", *words]
    program.append(f"run_dir={run_dir}")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        program, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        sys.exit(f"{tree}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def difference(first: Rows, other: Rows) -> str:
    """In words, how the metrics of two runs differ."""
    names = [
        {key for row in rows for key in row if not key.startswith(MEASURED)}
        for rows in (first, other)
    ]
    shared = names[0] & names[1]
    largest: dict[str, float] = {}
    num_values = 0
    for old, new in zip(first, other, strict=True):
        for key in shared & (old.keys() | new.keys()):
            num_values += 1
            change = _change(old.get(key), new.get(key))
            if change:
                largest[key] = max(largest.get(key, 0.0), change)
    text = f"{num_values} values of {len(shared)} metrics, "
    if largest:
        key, change = max(largest.items(), key=lambda pair: pair[1])
        text += f"{len(largest)} metrics differ, {key} most: by {change:.1e} of its value"
    else:
        text += "all the same bits"
    for name, own in (("before", names[0] - shared), ("now", names[1] - shared)):
        if own:
            text += f"; only {name}: {', '.join(sorted(own))}"
    return text


def _change(old: float | None, new: float | None) -> float:
    """Relative to the larger; 0 for the same bits, infinity where one is missing."""
    if old == new or (old != old and new != new):  # NaN is the same as NaN
        return 0.0
    if old is None or new is None:
        return float("inf")
    return abs(old - new) / max(abs(old), abs(new))


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that do not count")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--commits", nargs="+", required=True, metavar="COMMIT")
    parser.add_argument("--nproc", type=int, default=2, help="processes of a run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each commit")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there; give a folder that has one")
    if not any(word.startswith("experiment=") for word in options.overrides):
        options.overrides.insert(0, "experiment=quickstart_cpu")
    return options


def main() -> None:
    options = parsed_options()
    watch = Watch()
    words = [*options.overrides, f"model.path={options.model.resolve()}"]
    runs: list[list[Rows]] = [[] for _ in options.commits]
    with tempfile.TemporaryDirectory() as scratch:
        trees = [Path(scratch) / f"tree{number}" for number in range(len(runs))]
        for commit, tree in zip(options.commits, trees, strict=True):
            check_out(commit, tree)
        for turn in range(options.turns):
            for tree, found in zip(trees, runs, strict=True):
                found.append(run(tree, tree / f"run{turn}", options.nproc, words))
    print(f"{description()}; {watch.load()}.\n")
    print(f"| commit | median s/step | quartiles | against {options.commits[0]} |")
    print("|---|---|---|---|")
    first = runs[0][0]
    for commit, found in zip(options.commits, runs, strict=True):
        steps = [row for rows in found for row in rows if row["step"] > options.warmup]
        seconds = spread([row["time/step_s"] for row in steps])
        said = {difference(first, rows) for rows in found if rows is not first}
        print(
            f"| {commit} | {seconds.median:.3f} | {seconds.low:.3f}-{seconds.high:.3f} |"
            f" {' / '.join(sorted(said)) or '-'} |"
        )


if __name__ == "__main__":
    main()
