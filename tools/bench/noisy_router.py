"""Trains a tiny mixture of experts with and without router replay while the policy's routers have
noise, and prints how far sampler and trainer are apart and what the reward comes to.

    python tools/bench/noisy_router.py FOLDER --steps 100

The noise is new in every forward, as that of number formats and kernels: with the engine's weights
the routers choose other experts for some tokens. Runs that are in the folder are not repeated. The
noise alone, for a run of your own: ``--plugin tools/bench/noisy_router.py`` of megatron_rl.train.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

REPLAYS = ("none", "old_policy", "rollout")
SETTINGS = (
    "parallel=single",
    "rollout.tensor=1",
    "rollout.max_response_tokens=8",
    "optim.learning_rate=1e-3",
    # The gap is what is looked at; sequences that the engine did not sample are routed with noise.
    "weight_sync.logprob_check_every=0",
    "mismatch_limits.abort_above=null",
)
GAP = "mismatch/logprob_abs_diff_mean"
SIZE = 0.02  # of the noise: standard deviation, in units of the logits


def plant_noise() -> None:
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.gating
    draw = torch.Generator().manual_seed(0)

    def noisy(router: TopKRouter, states: torch.Tensor) -> torch.Tensor:
        logits = plain(router, states)
        return logits + SIZE * torch.randn(logits.shape, generator=draw)

    TopKRouter.gating = noisy


def rows_of(folder: Path, replay: str, seed: int, num_steps: int) -> list[dict]:
    """The metrics of a run of two processes, which is made where it is not there."""
    from tests.e2e.toy import overrides, rows

    run_dir = folder / "runs" / f"{replay}-{seed}"
    if not (run_dir / "export").exists():
        more = (*SETTINGS, f"rollout.router_replay={replay}", f"seed={seed}")
        words = overrides(folder, run_dir, *more, f"trainer.num_steps={num_steps}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "megatron_rl.train", "--plugin", __file__]
        subprocess.run([*command, *words], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
    return [row for row in rows(run_dir) if GAP in row][:num_steps]


def line(replay: str, runs: list[list[dict]]) -> str:
    """Means over seeds: the gap of the first step, of the first and the last fifth of the steps,
    and the largest of one token; the reward of the last fifth by seed."""
    gaps = np.array([[row[GAP] for row in run] for run in runs])
    most = max(row["mismatch/logprob_abs_diff_max"] for run in runs for row in run)
    rewards = np.array([[row["reward/mean"] for row in run] for run in runs])
    fifth = max(1, gaps.shape[1] // 5)
    parts = (gaps[:, :1], gaps[:, :fifth], gaps[:, -fifth:])
    figures = " ".join(f"{part.mean():.2e}" for part in parts)
    ends = " ".join(f"{value:.3f}" for value in rewards[:, -fifth:].mean(1))
    return f"{replay:10} {figures} {most:.2f}  reward {rewards[:, :fifth].mean():.3f} -> {ends}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    from tests.e2e.toy import write_data, write_experts

    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "model").exists():
        write_experts(options.folder / "model")
        write_data(options.folder / "data.jsonl")
    for replay in REPLAYS:
        seeds = range(options.seeds)
        runs = [rows_of(options.folder, replay, seed, options.steps) for seed in seeds]
        print(line(replay, runs), flush=True)


if __name__ == "__main__":
    main()
else:
    plant_noise()
