"""Every GPU benchmark, one after the other, and one table of what they found.

    python tools/bench/gpu_all.py --folder DIR [--only policy,logprob] [--limit-s 900] [--record FILE]
    python tools/bench/gpu_all.py --folder DIR --dry-run

Each is a process of its own with a time limit; one that fails or does not end is a row of the table, and the next one runs. The record
(``DIR/record.md`` unless ``--record`` names a file) starts with hardware, versions and commit. ``--dry-run`` runs all of them with tiny
models on any machine, which shows that they are sound and measures nothing.

Exit code: 0 when all ran, 1 when one did not, 2 without a CUDA device (and without ``--dry-run``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import Watch

HERE = Path(__file__).resolve().parent
VERSIONS = ("torch", "megatron-core", "vllm", "transformer-engine", "transformer-engine-torch", "transformers")
TINY = "--layers 2 --hidden 128 --ffn 192 --heads 4 --kv-heads 2 --vocab 256"


@dataclass(frozen=True)
class Benchmark:
    """``program`` beside this file with ``arguments``; ``tiny``: those that make it small."""

    name: str
    program: str
    arguments: str
    tiny: str


STEPS = f"{TINY} --steps 3 --prompts 2 --prompt-tokens 8 --response-tokens 8 --tokens-per-microbatch 64"
BENCHMARKS = (
    Benchmark("policy", "gpu_policy.py", "", f"{TINY} --sequences 2 --length 32 --repeat 1 --precisions bf16,fp8_tensorwise"),
    Benchmark("logprob", "gpu_logprob.py", "", "--hidden 64 --vocab 256 --rows 64 --repeat 1"),
    Benchmark("refit", "gpu_refit.py", "", f"{TINY} --steps 2 --override rollout.max_num_seqs=8"),
    Benchmark("refit_plan", "gpu_refit.py", "--override weight_sync.path=plan", f"{TINY} --steps 2"),
    Benchmark("steps", "gpu_steps.py", "", STEPS),
    Benchmark("steps_fp8", "gpu_steps.py", "--override precision=fp8_tensorwise --override rollout=vllm_fp8", ""),
)


@dataclass(frozen=True)
class Outcome:
    """``rows`` of the benchmark's tables; ``failure`` is None when it ended well."""

    name: str
    rows: list[dict[str, object]]
    failure: str | None
    seconds: float


def run(name: str, command: Sequence[object], results: Path, limit_s: float) -> Outcome:
    """Runs one benchmark, which writes its rows to ``results``; its output is passed on. Ends it and its children at the limit."""
    results.unlink(missing_ok=True)
    search = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    begin, failure = time.perf_counter(), None
    process = subprocess.Popen([str(word) for word in command], env=environment, start_new_session=True)
    try:
        code = process.wait(limit_s)
        failure = f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        failure = f"no end within {limit_s:g} s"
    finally:
        end(process)
    rows = json.loads(results.read_text(encoding="ascii")) if results.is_file() else []
    if not rows and failure is None:
        failure = "no results"
    return Outcome(name, rows, failure, time.perf_counter() - begin)


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the benchmark may hold the device when the next one starts. All of its session is asked to end first: the ranks of a
    launch lead sessions of their own and end with their launcher, if that is not killed."""
    for how, patience_s in ((signal.SIGTERM, 40.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        there = _send(process, how)
        while there and time.monotonic() < deadline:
            time.sleep(0.2)
            there = _send(process, None)
        if not there:
            return


def _send(process: subprocess.Popen[bytes], how: signal.Signals | None) -> bool:
    """Whether anything of the session is left; sends it ``how``."""
    process.poll()
    try:
        os.killpg(process.pid, how or 0)
    except ProcessLookupError:
        return False
    return True


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each row of each benchmark: what was measured (its texts), the figures (its numbers); failures are rows too."""
    lines = ["| benchmark | what | figures | seconds in all |", "| --- | --- | --- | --- |"]
    for one in outcomes:
        for number, row in enumerate(one.rows):
            what = ", ".join(str(value) for value in row.values() if isinstance(value, str))
            figures = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
                if not isinstance(value, str)
            )
            lines.append(f"| {one.name} | {what} | {figures} | {f'{one.seconds:.0f}' if number == 0 else ''} |")
        if one.failure is not None:
            lines.append(f"| {one.name} | FAILED | {one.failure} | {one.seconds:.0f} |")
    return "\n".join(lines)


def heading(arguments: Sequence[str], watch: Watch) -> str:
    """Hardware, versions, commit, command, and what else the machine did."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    hardware = "no CUDA device" if device is None else f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return "\n".join(
        [
            "# GPU benchmarks", "", f"`python tools/bench/gpu_all.py {shlex.join(arguments)}`", "",
            f"{hardware}; {os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(found)}; commit {commit or 'unknown'}; "
            f"{time.strftime('%Y-%m-%d')}; {watch.load()}.",
        ]
    )  # fmt: skip


def chosen(only: str | None, dry_run: bool) -> list[Benchmark]:
    """The benchmarks to run. Raises ValueError for an unknown name."""
    known = {one.name: one for one in BENCHMARKS if not dry_run or one.tiny}
    names = list(known) if only is None else only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--only: {', '.join(unknown)}: no such benchmark; there are {', '.join(known)}")
    return [known[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for models and results; needs room for 30 GB")
    parser.add_argument("--only", help="names, separated by commas: " + ", ".join(one.name for one in BENCHMARKS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="most seconds of one benchmark")
    parser.add_argument("--record", type=Path, help="where the record is written")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; runs without a GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        print("error: no CUDA device on this machine; --dry-run runs everything with tiny models", file=sys.stderr)
        return 2
    try:
        benchmarks = chosen(options.only, options.dry_run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    watch = Watch()
    record, outcomes = options.record or options.folder / "record.md", []
    for one in benchmarks:
        results = options.folder / f"{one.name}.json"
        sizes = shlex.split(one.tiny if options.dry_run else "") + shlex.split(one.arguments)
        command = [sys.executable, HERE / one.program, "--folder", options.folder, "--json", results, *sizes]
        print(f"## {one.name}: {shlex.join(map(str, command))}", flush=True)
        outcomes.append(run(one.name, command, results, options.limit_s))
        # after each: a lost machine keeps the rest
        record.write_text(f"{heading(sys.argv[1:], watch)}\n\n{table(outcomes)}\n", encoding="utf-8")
    print(record.read_text(encoding="utf-8"))
    return int(any(one.failure is not None for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
