"""Shares of this machine for several runs at a time."""

from __future__ import annotations

from collections.abc import Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"

Share = Mapping[str, str]  # environment variables of a run, in addition to those of the sweep


def shares(
    parallel: int, nproc: int, environment: Mapping[str, str], num_gpus: int, num_cores: int
) -> list[Share]:
    """Neighboring GPUs for each run, one a process; without GPUs the cores in equal parts.

    ``torchrun`` gives several processes one thread each, so that cores matter to a run of a single
    process alone. A number of threads that is set already stays.

    Example: two runs of two processes on four GPUs get the GPUs ``0,1`` and ``2,3``.

    Raises:
        ValueError: fewer GPUs than processes.
    """
    if parallel == 1:
        return [{}]
    if num_gpus:
        visible = [str(index) for index in range(num_gpus)]
        if environment.get(_VISIBLE):
            # Names of the user's, which need not be 0, 1, ... CUDA stops at the first that does not
            # exist, so that fewer may count than are listed.
            visible = environment[_VISIBLE].split(",")[:num_gpus]
        wanted = parallel * nproc
        if wanted > num_gpus:
            raise ValueError(
                f"--parallel {parallel} --nproc {nproc}: a process has a GPU of its own, which "
                f"makes {wanted}, and {num_gpus} are visible; lower one of them"
            )
        starts = range(0, wanted, nproc)
        return [{_VISIBLE: ",".join(visible[first : first + nproc])} for first in starts]
    if nproc > 1 or _THREADS in environment:
        return [{} for _ in range(parallel)]
    return [{_THREADS: str(max(1, num_cores // parallel))} for _ in range(parallel)]
