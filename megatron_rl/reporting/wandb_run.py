"""Metrics in Weights & Biases. Only rank 0 writes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.errors import concerning
from megatron_rl.reporting.metrics_file import Row
from megatron_rl.reporting.row_file import replace_text
from megatron_rl.reporting.sinks import Metrics

_INIT_S = 30.0  # how long the server may take to answer at the start
_FINISH_S = 60.0  # how long the end of a run may take when nothing can be sent
_ID = "wandb_id"


class WandbRun:
    """Logs to the wandb run of a folder: a start that continues writes to the same one."""

    def __init__(
        self, run_dir: Path, config: Config, record: Mapping[str, Any], earlier: Sequence[Row] = ()
    ) -> None:
        """Opens it, by ``config.logging``.

        Args:
            record: what the page of the run shows as its configuration.
            earlier: the rows of the steps before this start. wandb is given those that it lacks:
                a start that was killed loses its last seconds there, and an offline one is no part
                of this one's file.
        """
        import wandb

        wanted = config.logging
        assert wanted.wandb != "disabled"
        self._offline = wanted.wandb == "offline"
        tags = (config.method.name, f"seed={config.seed}", *wanted.wandb_tags)
        remedy = (
            "is the network there? logging.wandb=offline needs none (wandb sync sends it later)"
        )
        with concerning(f"logging.wandb = {wanted.wandb}", remedy, (wandb.Error,)):
            self._run = wandb.init(
                project=wanted.wandb_project,
                mode=wanted.wandb,
                name=wanted.wandb_name or run_dir.resolve().name,
                group=wanted.wandb_group,
                job_type=wanted.wandb_job_type,
                tags=list(dict.fromkeys(tags)),  # the user may repeat the run's
                dir=str(run_dir),
                id=run_id(run_dir),
                resume=None if self._offline else "allow",
                config=dict(record),
                settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S, quiet=True),
            )
        # Asked once: it is a message to wandb's own process. Rows of steps before this one it has.
        next_step = self._run.step if earlier else 0
        for row in earlier:
            if int(row["step"] or 0) >= next_step:
                self({key: math.nan if value is None else value for key, value in row.items()})

    def __call__(self, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=int(metrics["step"]))

    def close(self, *, failed: bool = False) -> None:
        """Sends or writes what is left. Without it the last seconds before the end of the process
        are lost: its end is no orderly one (``runtime/guard/failure.py``)."""
        self._run.finish(exit_code=int(failed))
        if self._offline:
            # ``finish`` does not wait until an offline file is written, the end of wandb's own
            # process does. Online that one could wait for a network without end.
            import wandb

            wandb.teardown(int(failed))


def run_id(run_dir: Path) -> str:
    """The id of the wandb run of this folder; made up at the first call."""
    file = run_dir / _ID
    if not file.is_file():
        replace_text(file, secrets.token_hex(8) + "\n")
    return file.read_text(encoding="ascii").strip()
