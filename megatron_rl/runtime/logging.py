"""Where metrics go: metrics.jsonl, the console, TensorBoard, wandb. Rank 0 writes; other ranks hold a silent logger."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from megatron_rl.runtime.display import duration

Metrics = Mapping[str, float]
TIME_LEFT_STEPS = 30


class MetricsFile:
    """``metrics.jsonl``: one object a step, behind those that are there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, metrics: Metrics) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with self._path.open("a", encoding="ascii") as file:
            file.write(json.dumps(finite) + "\n")


class ConsoleLine:
    """One line a step: what a person watches. It ends with the time that is left, by the mean of
    the last steps as they really took, evaluations and checkpoints included."""

    COLUMNS: Sequence[tuple[str, str, str]] = (
        ("reward", "reward/mean", "{:.3f}"),
        ("acc", "reward/accuracy", "{:.3f}"),
        ("len", "rollout/response_tokens_mean", "{:.1f}"),
        ("entropy", "rollout/entropy", "{:.3f}"),
        ("kl", "loss/kl", "{:.1e}"),
        ("grad", "optim/grad_norm", "{:.3f}"),
        ("|dlogp|max", "mismatch/logprob_abs_diff_max", "{:.0e}"),
        ("tok/s", "throughput/response_tokens_per_s", "{:.0f}"),
    )
    PHASES: Sequence[str] = ("rollout", "reward", "logprob", "update", "sync")

    def __init__(
        self, num_steps: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._console = console
        self._clock = clock
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=TIME_LEFT_STEPS)

    def __call__(self, metrics: Metrics) -> None:
        parts = [f"[bold]step {int(metrics['step'])}/{self._num_steps}[/bold]"]
        parts += [f"{label} {form.format(metrics[key])}" for label, key, form in self.COLUMNS if key in metrics]
        if "time/step_s" in metrics:
            phases = " ".join(f"{phase} {metrics[f'time/{phase}_s']:.2f}" for phase in self.PHASES if f"time/{phase}_s" in metrics)
            parts.append(f"{metrics['time/step_s']:.2f}s [dim]({phases})[/dim]")
        if "eval/accuracy" in metrics:
            parts.append(f"[bold green]held-out accuracy {metrics['eval/accuracy']:.3f}[/bold green]")
        left = self._time_left(int(metrics["step"]))
        if left is not None:
            parts.append(f"[dim]left {duration(left)}[/dim]")
        self._console.print("  ".join(parts))

    def _time_left(self, step: int) -> float | None:
        """Seconds to the last step; None before two lines and after the last."""
        now = self._clock()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        steps_left = self._num_steps - step
        if not self._seconds or steps_left <= 0:
            return None
        # The mean counts an evaluation every so many steps; a median would not.
        return steps_left * fmean(self._seconds)


def tensorboard_writer(run_dir: Path) -> Callable[[Metrics], None]:
    """Scalars under ``run_dir/tensorboard``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(metrics: Metrics) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, int(metrics["step"]))
        writer.flush()

    return write


def wandb_writer(run_dir: Path, project: str, mode: str, config: Mapping[str, Any]) -> Callable[[Metrics], None]:
    """A wandb run; ``offline`` needs no account and writes below ``run_dir/wandb``."""
    import wandb

    run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), mode=mode, config=dict(config))

    def write(metrics: Metrics) -> None:
        run.log(dict(metrics), step=int(metrics["step"]))

    return write
