"""What every program of a launch does first: it ends with its torchrun, it ends at once on SIGTERM,
and its errors are said once (``runtime/failure.py``)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.runtime import parent
from megatron_rl.runtime.failure import STATE, leave, report
from megatron_rl.runtime.termination import answer_termination


@functools.cache
def prepare() -> None:
    """Once per process, in its main thread. ``launch.start`` does it where ``reported`` did not."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent is a shell, which may end before
        parent.end_with_it()
    answer_termination()
    STATE.ballot.arrive()


@contextmanager
def reported() -> Iterator[None]:
    """Around the whole of a program. An exception inside ends the process: that of the first rank is
    said, see ``failure.report``. ``SystemExit`` passes.

    Example::

        with reported():
            world = start()
            ...
        leave(0)
    """
    prepare()
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (reported, then the process ends)
        leave(report(error))
