"""Destinations of metrics: metrics.jsonl and the console. Only rank 0 writes."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from rich.console import Console

from megatron_rl.runtime.display import duration

Metrics = Mapping[str, float | int]
_TIME_LEFT_STEPS = 30


def metrics_line(metrics: Metrics) -> str:
    """A line of ``metrics.jsonl``; a value that is not finite is null, as JSON has no NaN."""
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    return json.dumps(finite) + "\n"


def append_metrics(path: Path, metrics: Metrics) -> None:
    """Opened anew for each row, and written in one piece with its line break: a kill leaves whole
    rows, and at most one cut off at the end."""
    with path.open("a", encoding="ascii") as file:
        file.write(metrics_line(metrics))


@dataclass
class ConsoleLine:
    """One line a step, for the user.

    It ends with the time left, by the mean duration of the last ``_TIME_LEFT_STEPS`` steps,
    evaluations and checkpoints included.
    """

    COLUMNS: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("reward", "reward/mean", "{:.3f}"),
        ("acc", "reward/accuracy", "{:.3f}"),
        ("len", "rollout/response_tokens_mean", "{:.1f}"),
        ("entropy", "rollout/entropy", "{:.3f}"),
        ("kl", "loss/kl", "{:.1e}"),
        ("grad", "optim/grad_norm", "{:.3f}"),
        ("|dlogp|max", "mismatch/logprob_abs_diff_max", "{:.0e}"),
        ("tok/s", "throughput/response_tokens_per_s", "{:.0f}"),
    )
    PHASES: ClassVar[Sequence[str]] = ("rollout", "reward", "logprob", "update", "sync")

    num_steps: int
    console: Console
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIME_LEFT_STEPS))

    def __call__(self, metrics: Metrics) -> None:
        step = int(metrics["step"])
        fields = [f"[bold]step {step}/{self.num_steps}[/bold]"]
        for label, key, form in self.COLUMNS:
            if key in metrics:
                fields.append(f"{label} {form.format(metrics[key])}")
        if "time/step_s" in metrics:
            present = [phase for phase in self.PHASES if f"time/{phase}_s" in metrics]
            phases = " ".join(f"{phase} {metrics[f'time/{phase}_s']:.2f}" for phase in present)
            fields.append(f"{metrics['time/step_s']:.2f}s [dim]({phases})[/dim]")
        if "eval/accuracy" in metrics:
            accuracy = f"held-out accuracy {metrics['eval/accuracy']:.3f}"
            fields.append(f"[bold green]{accuracy}[/bold green]")
        seconds = self._time_left(step)
        if seconds is not None:
            fields.append(f"[dim]left {duration(seconds)}[/dim]")
        self.console.print("  ".join(fields))

    def _time_left(self, step: int) -> float | None:
        """Seconds to the last step; None on the first line and on the last."""
        now = self.clock()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        steps_left = self.num_steps - step
        if not self._seconds or steps_left <= 0:
            return None
        # The mean counts an evaluation every so many steps; a median would not.
        return steps_left * fmean(self._seconds)
