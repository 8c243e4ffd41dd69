"""The processes of a launch: who this one is, and the collectives of control.

These carry objects and flags, apart from the groups of training.
"""

import logging
import os
import pickle
import re
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import first_line
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.guard.failure import Peer
from megatron_rl.runtime.guard.failure import exit_process as exit_process
from megatron_rl.runtime.guard.heartbeat import SILENT_S, Heartbeat
from megatron_rl.runtime.process import prepare
from megatron_rl.runtime.process import reported as reported

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
# The first release of torch whose CUDA build adds products of bfloat16 onto a float32 matrix
# (torch.addmm with out_dtype, its input given as ``out``), as the backward of the logprobs does.
_FIRST_TORCH_ON_CUDA = (2, 11)
# A rank may wait for the longest response of another, however long that takes; what ends a launch
# that hangs is the heartbeat. Every group of a run gets this limit: torch's own are 10 and 30
# minutes, and gloo overflows at 10 years.
NO_LIMIT = timedelta(days=365)
# What torchrun sets, with the values of a world of one.
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@dataclass(frozen=True)
class World:
    """The ranks of a launch, and the control collectives over them.

    Objects travel over gloo, so that control never waits for a device queue.
    """

    rank: int
    size: int
    local_rank: int
    launch_id: str  # unique to this launch, equal on its ranks
    control_group: Any = None
    local_size: int = 1  # ranks on this machine; neighbors in rank order
    heartbeat: Heartbeat | None = None

    def watch(self, stall_s: float, folder: Path) -> None:
        """Ends the launch when no rank gets anything done for ``stall_s``; the stacks of all ranks
        are then in ``folder``."""
        if self.heartbeat is not None:
            self.heartbeat.stall_s = stall_s
            self.heartbeat.folder = folder

    def begin_training(self) -> None:
        """Everything is built and loaded: a machine that gives no sign is lost from now on."""
        if self.heartbeat is not None:
            self.heartbeat.silent_s = SILENT_S

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        gathered = gather_objects(value, self.control_group)
        ACTIVITY.note("a collective of control")
        return gathered

    def any(self, flag: bool) -> bool:
        """True when the flag is set on any rank."""
        return any(self.all_gather(bool(flag)))

    def barrier(self) -> None:
        self.all_gather(None)

    def team(self, size: int) -> Any:
        """Collective: a control group of this rank and its neighbors, ``size`` in all. The ranks
        are cut into such teams from 0 on."""
        own, _ = dist.new_subgroups(size, timeout=NO_LIMIT, backend="gloo")
        return own

    def from_main(self, action: Callable[[], Value]) -> Value:
        """What ``action`` returns or raises on rank 0, on every rank."""
        if self.size == 1:
            return action()
        return from_first_rank(action, self.control_group)

    def on_all_ranks(self, action: Callable[[], Value]) -> list[Value]:
        """See the function ``on_all_ranks``."""
        return [action()] if self.size == 1 else on_all_ranks(action, self.control_group)


def gather_objects(value: Value, group: Any = None) -> list[Value]:
    """Collective: ``value`` of every rank of ``group`` (None: all), in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_all_ranks(
    action: Callable[[], Value], group: Any = None, kind: type[Exception] = ValueError
) -> list[Value]:
    """Collective: what ``action`` returns on every rank, in rank order.

    The first rank's error of this ``kind`` is raised on every rank: one that continued alone would
    wait in the next collective.
    """
    outcome: list[Any] = [None, None]  # result, error
    try:
        outcome = [action(), None]
    except kind as raised:
        outcome = [None, _sendable(raised)]
    outcomes = gather_objects(outcome, group)
    for _, error in outcomes:
        if error is not None:
            raise error from outcome[1]
    return [result for result, _ in outcomes]


def from_first_rank(action: Callable[[], Value], group: Any = None) -> Value:
    """Collective: what ``action`` returns or raises on the first rank, on every rank of ``group``
    (None: all). Returns after every rank has called it."""
    outcome: list[Any] = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome = [action(), None]
        except Exception as raised:  # noqa: BLE001 (raised again on every rank)
            outcome = [None, _sendable(raised)]
    # One copy to each rank; gathering would send each the padding of all others.
    dist.broadcast_object_list(outcome, src=0, group=group)
    gather_objects(None, group)
    ACTIVITY.note("a collective of control")
    result, error = outcome
    if error is not None:
        raise error
    return result


def _sendable(error: Exception) -> Exception:
    """``error``; in its place one that says the same where pickle cannot carry it to other ranks.

    pickle writes the class and ``args``, and reads by calling the one with the other. A class whose
    constructor needs more than its text is written and cannot be read: then only the ranks that
    have no part in the error would fail, and with a TypeError.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:  # noqa: BLE001 (whatever the class of a user raises)
        text = f"{type(error).__name__}: {error}"
        logger.debug("%s is sent as its text: %s", text, problem)
        # What callers tell apart: the user's errors, and those of a connection.
        kinds = (ValueError, ConnectionError, OSError, RuntimeError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        plain = kind(text)
        plain.__cause__ = error
        return plain
    return error


def start(timeout_s: float = NO_LIMIT.total_seconds()) -> World:
    """Joins the launch of torchrun (or a world of one), selects this rank's device, begins to log.

    Raises:
        ValueError: only some of torchrun's variables are set, or torch is too old for CUDA.
    """
    # CUDA reads it when it starts. The backward of a layer that is cut over ranks starts a
    # collective, then a matrix product that is to run at the same time. One queue of work to the
    # device keeps this order; with several the product can come first and fill the device. A value
    # of the user stays.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        refuse_old_torch(torch.__version__)
    _complete_variables()
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    prepare()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    join("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout_s)
    control = dist.new_group(backend="gloo", timeout=NO_LIMIT) if on_gpu else dist.group.WORLD
    rank = dist.get_rank()
    size = dist.get_world_size()
    cards = gather_objects((uuid.uuid4().hex[:12], socket.gethostname(), os.getpid()), control)
    peers = [Peer(other, host, pid) for other, (_, host, pid) in enumerate(cards)]
    failure.STATE.rank = rank
    failure.STATE.peers = peers
    heartbeat = Heartbeat(rank, peers)
    _configure_logging(rank)
    return World(rank, size, local_rank, cards[0][0], control, local_size, heartbeat)


def lift_time_limits() -> None:
    """Gives ``NO_LIMIT`` to all groups of this process, also those whose maker takes no limit."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(NO_LIMIT, group)


def _complete_variables() -> None:
    """Sets the variables of a world of one where torchrun has set none.

    Raises:
        ValueError: some are set and others not.
    """
    present = [name for name in _ALONE if name in os.environ]
    for name in present:
        if name != "MASTER_ADDR" and not os.environ[name].isdecimal():
            raise ValueError(f"launch: {name} = {os.environ[name]!r}: not a number; see torchrun")
    if present and len(present) < len(_ALONE):
        missing = ", ".join(sorted(_ALONE.keys() - set(present)))
        raise ValueError(
            f"launch: {missing} not set although {', '.join(present)} is; start with torchrun, or"
            " unset them"
        )
    if not present:
        os.environ.update(_ALONE)


def refuse_old_torch(version: str) -> None:
    """Checks the version of a torch with CUDA, e.g. "2.13.0+cu130" or "2.11.0a0+eb65b36.nv26.02".

    Raises:
        ValueError: it is older than ``_FIRST_TORCH_ON_CUDA``; the first update would fail.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) >= _FIRST_TORCH_ON_CUDA:
        return
    wanted = ".".join(map(str, _FIRST_TORCH_ON_CUDA))
    raise ValueError(
        f"launch: torch {version} cannot train on CUDA: it has no torch.addmm of bfloat16 matrices"
        f" into a float32 one; torch {wanted} or newer is needed. Install the extra `gpu` of"
        " setup.py, which names the tested versions, or use an image that Dockerfile.ngc builds"
    )


def join(backend: str, timeout_s: float) -> None:
    """``init_process_group``, with an error of the user's where the port is taken."""
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistNetworkError as error:
        if not re.search(r"EADDRINUSE|address already in use", str(error)):
            raise
        raise ValueError(
            f"launch: port {os.environ['MASTER_PORT']} of this machine is taken by another program;"
            " stop that, or choose another port (torchrun --standalone takes a free one)"
        ) from None
    except RuntimeError as error:  # of gloo
        if "Unable to find address for" not in str(error):
            raise
        raise ValueError(
            f"launch: GLOO_SOCKET_IFNAME: {first_line(error)}; name one that is there"
            " (ip link), or unset it"
        ) from error


class _StderrHandler(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is at that moment.

    While the display shows a live line, it replaces ``sys.stderr``; lines printed past it would
    break that line.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler would keep the present stream

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def _configure_logging(rank: int) -> None:
    """Logs to stderr: INFO from rank 0, ERROR from all ranks.

    Of Python warnings only this package's own are shown: those of libraries are for their
    developers (``python -W default`` brings them back).
    """
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("megatron_rl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        # runtime.device stands between torch and its callers, so torch's warnings name it.
        warnings.filterwarnings("default", module=r"megatron_rl\.(?!runtime\.device)")


def log_to_file(folder: Path, rank: int, launch_id: str) -> None:
    """Sends both streams of this process, libraries in C and children included, to
    ``folder/rank_N.log``, after those of earlier starts. The first failure of a launch is reported
    on the console all the same (``failure.say``).

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.write(file, f"--- launch {launch_id}, rank {rank}, {when}\n".encode())
    # What Python has buffered so far belongs to the console.
    sys.stdout.flush()
    sys.stderr.flush()
    failure.STATE.console = os.dup(2)
    # Numbers 1 and 2 themselves, which libraries in C write to and children inherit.
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
