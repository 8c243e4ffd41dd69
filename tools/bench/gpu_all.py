"""Everything that is to be run on a GPU, in order, and one table of what it found.

    python tools/bench/gpu_all.py --folder DIR [--only policy,logprob] [--limit-s 900] \\
        [--record FILE]
    python tools/bench/gpu_all.py --folder DIR --dry-run

The order is from what is small and decides much to what is large: single calls, tests of the policy
and of the engine, waits of the host, then figures. Each part is a process of its own with a time
limit. One that fails or does not end is a row of the table. Behind a failed probe nothing is run:
what the code takes for granted does not hold there. ``--only`` runs parts that are named. The
record (``DIR/record.md`` unless ``--record`` names a file) starts with hardware, versions and
commit. ``--dry-run`` runs all parts with tiny models on any machine, which shows that they are
sound and measures nothing.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import Watch

HERE = Path(__file__).resolve().parent
ENGINES = ("transformer-engine", "transformer-engine-torch")
VERSIONS = ("torch", "megatron-core", "vllm", *ENGINES, "transformers")
TINY = "--layers 2 --hidden 128 --ffn 192 --heads 4 --kv-heads 2 --vocab 256"


@dataclass(frozen=True)
class Part:
    """``program`` beside this file with ``arguments``; ``tiny``: those that make it small (None:
    not in a dry run). ``limit_s``: most seconds it may take (None: as the command line says)."""

    name: str
    program: str
    arguments: str
    tiny: str | None
    limit_s: float | None = None


STEPS = (
    f"{TINY} --steps 3 --prompts 2 --prompt-tokens 8 --response-tokens 8 --tokens-per-microbatch 64"
)
OTHER_RUNNER = (
    "--again-with VLLM_USE_V2_MODEL_RUNNER=0 --again-with"
    " MEGATRON_RL_TEST_ENGINE=rollout.enforce_eager=true"
)
FEW = "--sequences 2 --length 32"
PROBE = "probe"
PARTS = (
    Part(PROBE, "gpu_probe.py", "", "", limit_s=240.0),
    Part("test_policy", "gpu_tests.py", "tests/gpu/test_policy.py", ""),
    Part("test_engine", "gpu_tests.py", f"tests/gpu/test_engine.py {OTHER_RUNNER}", ""),
    Part("waits", "gpu_waits.py", "", f"{TINY} {FEW}"),
    Part(
        "policy",
        "gpu_policy.py",
        "--precisions bf16,fp8_tensorwise --profile",
        f"{TINY} {FEW} --repeat 1",
    ),
    Part("logprob", "gpu_logprob.py", "", "--hidden 64 --vocab 256 --rows 64 --repeat 1"),
    Part(
        "refit", "gpu_refit.py", "--steps 20", f"{TINY} --steps 2 --override rollout.max_num_seqs=8"
    ),
    Part(
        "refit_plan",
        "gpu_refit.py",
        "--steps 20 --override weight_sync.method=reshard",
        f"{TINY} --steps 2",
    ),
    Part("steps", "gpu_steps.py", "--steps 6", STEPS),
    Part("policy_fp8", "gpu_policy.py", "--precisions bf16,fp8_delayed,fp8_blockwise,mxfp8", None),
    Part("refit_long", "gpu_refit.py", "--steps 50", None),
    Part(
        "steps_fp8",
        "gpu_steps.py",
        "--override precision=fp8_tensorwise --override rollout=vllm_fp8",
        None,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """``rows`` of the part's tables; ``failure`` is None when it ended well or, without rows, was
    not run."""

    name: str
    rows: list[dict[str, object]]
    failure: str | None
    seconds: float


def run(name: str, command: Sequence[object], results: Path, limit_s: float) -> Outcome:
    """Runs one part, which writes its rows to ``results``; its output is passed on. Ends it and its
    children at the limit."""
    results.unlink(missing_ok=True)
    search = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    begin, failure = time.perf_counter(), None
    process = subprocess.Popen(
        [str(word) for word in command], env=environment, start_new_session=True
    )
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
    """Nothing of a part may hold the device when the next one starts. All of its session is asked
    to end first: the ranks of a launch lead sessions of their own and end with their launcher, if
    that is not killed."""
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
    """A row for each row of each part: what was measured (its texts), the figures (its numbers).
    Failures, and what was not run for them, are rows too."""
    lines = ["| part | what | figures | seconds in all |", "| --- | --- | --- | --- |"]
    for one in outcomes:
        for number, row in enumerate(one.rows):
            what = ", ".join(str(value) for value in row.values() if isinstance(value, str))
            figures = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
                if not isinstance(value, str)
            )
            lines.append(
                f"| {one.name} | {what} | {figures} |"
                f" {f'{one.seconds:.0f}' if number == 0 else ''} |"
            )
        if one.failure is not None:
            lines.append(f"| {one.name} | FAILED | {one.failure} | {one.seconds:.0f} |")
        elif not one.rows:
            lines.append(f"| {one.name} | NOT RUN | the probe failed | |")
    return "\n".join(lines)


def heading(arguments: Sequence[str], watch: Watch) -> str:
    """Hardware, versions, commit, command, and what else the machine did."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    hardware = (
        "no CUDA device"
        if device is None
        else f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    commit = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    return "\n".join(
        [
            "# GPU benchmarks",
            "",
            f"`python tools/bench/gpu_all.py {shlex.join(arguments)}`",
            "",
            (
                f"{hardware}; {os.cpu_count()} cores; Python {platform.python_version()},"
                f" {', '.join(found)}; commit {commit or 'unknown'}; {time.strftime('%Y-%m-%d')};"
                f" {watch.load()}."
            ),
        ]
    )


def chosen(only: str | None, dry_run: bool) -> list[Part]:
    """The parts to run, in the order of ``PARTS`` or as named. Raises ValueError for an unknown
    name."""
    known = {one.name: one for one in PARTS if not dry_run or one.tiny is not None}
    names = list(known) if only is None else only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"--only: {', '.join(unknown)}: no such part; there are {', '.join(known)}"
        )
    return [known[name] for name in names]


def in_order(parts: Sequence[Part], start: Callable[[Part], Outcome]) -> Iterator[Outcome]:
    """What came of each part; behind a failed probe nothing is started."""
    probe_failed = False
    for part in parts:
        if probe_failed:
            yield Outcome(part.name, [], None, 0.0)
            continue
        outcome = start(part)
        yield outcome
        probe_failed = part.name == PROBE and outcome.failure is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="for models and results; needs room for 30 GB"
    )
    parser.add_argument(
        "--only", help="names, separated by commas: " + ", ".join(one.name for one in PARTS)
    )
    parser.add_argument("--limit-s", type=float, default=900.0, help="most seconds of one part")
    parser.add_argument("--record", type=Path, help="where the record is written")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; runs without a GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        print(
            "error: no CUDA device on this machine; --dry-run runs everything with tiny models",
            file=sys.stderr,
        )
        return 2
    try:
        parts = chosen(options.only, options.dry_run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    watch = Watch()
    record, outcomes = options.record or options.folder / "record.md", []

    def start(part: Part) -> Outcome:
        results = options.folder / f"{part.name}.json"
        sizes = shlex.split(part.arguments) + shlex.split(
            (part.tiny or "") if options.dry_run else ""
        )
        command = [sys.executable, HERE / part.program, "--folder", options.folder]
        command += ["--json", results, *sizes]
        print(f"## {part.name}: {shlex.join(map(str, command))}", flush=True)
        return run(
            part.name, command, results, min(options.limit_s, part.limit_s or options.limit_s)
        )

    for outcome in in_order(parts, start):
        outcomes.append(outcome)
        # after each: a lost machine keeps the rest
        record.write_text(
            f"{heading(sys.argv[1:], watch)}\n\n{table(outcomes)}\n", encoding="utf-8"
        )
    print(record.read_text(encoding="utf-8"))
    return int(any(one.failure is not None for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
