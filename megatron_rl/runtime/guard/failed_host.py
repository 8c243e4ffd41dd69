"""The machine on which a launch failed, for the batch script that starts it again on others.

srun can only tell which task ended first. Where a machine has lost its network, those of the
machines that are well do.
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl.runtime.guard.first_failure import bounded, create

FAILED_HOST = "failed_host"  # in the folder of a run


def write(file: Path | None, host: str) -> None:
    """Notes the machine, unless one is noted already; empty: no machine is known to be at fault.

    ``file``: None where it is not read. A disk that does not answer is not waited for.
    """
    if file is not None:
        bounded(lambda: create(file, host + "\n"))
