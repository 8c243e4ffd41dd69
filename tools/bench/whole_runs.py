"""Runs of training as a whole, for the benchmarks that compare them: their environment, their
options, and the metrics that they leave."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

LIMIT_S = 1800  # of one run
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
Rows = list[dict[str, float]]


def torchrun(nproc: int) -> tuple[str, ...]:
    """Behind ``python -m``: ``nproc`` processes of training."""
    return (
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
        "-m",
        "megatron_rl.train",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that do not count")
    parser.add_argument("overrides", nargs="*", metavar="key=value")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line; the experiment is that of the quickstart unless given."""
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there; give a folder that has one")
    if not any(word.startswith("experiment=") for word in options.overrides):
        options.overrides.insert(0, "experiment=quickstart_cpu")
    return options


def metrics(run_dir: Path) -> Rows:
    """One row a step, and those of evaluations."""
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]
