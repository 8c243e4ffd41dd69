"""One process group over processes that were not launched together: the ranks of a trainer and the
workers of its servers."""

import gc
import hashlib
import hmac
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.errors import chain
from megatron_rl.runtime.process import restored_variables

POLL_S = 0.002


class JointGroupError(RuntimeError):
    """A step of a whole joint group cannot begin; the message says what is wrong, and where."""


class Barrier:
    """A barrier that processes pass only when all of them are there and well, so that none hangs in
    the collective step after it; afterwards the first process learns how the step ended for the
    others. A step has a name of its own; a problem is a text, "" means none.

    Every text is signed with the secret of the run: a process without it is not admitted. Only
    these control messages are signed, not tensor data: see ``join_group``.
    """

    def __init__(self, store: dist.Store, secret: str = "") -> None:
        """``secret``: of the run; empty where the network is all that keeps others out."""
        self.store = store
        self.secret = secret
        self._keys: deque[list[str]] = deque()  # of the steps that have begun, by the first

    def wait(self, step: str, rank: int, problem: str = "") -> None:
        """Waits until the first process calls ``release``; for all but the first. Raises
        JointGroupError when any process has a problem."""
        self._write(f"{step}/{rank}", problem)
        verdict = self._read(f"{step}/verdict")
        if verdict:
            raise JointGroupError(verdict)

    def release(
        self, step: str, ranks: Sequence[int], absent: Callable[[], Mapping[int, str]]
    ) -> dict[int, str]:
        """For the first process: waits until all ``ranks`` arrived, or ``absent()`` says which will
        not and why. Returns the problems by rank; with any, the step does not begin."""
        keys = [f"{step}/{rank}" for rank in ranks]
        problems: Mapping[int, str] = {}
        # ``check`` does not wait, as ``get`` would: meanwhile a process may turn out to be absent.
        while not problems and not self.store.check(keys):
            problems = absent()
            time.sleep(POLL_S)
        problems = problems or self._texts(keys, ranks)
        self._write(f"{step}/verdict", combined(problems))
        ends = [f"{step}/end/{rank}" for rank in ranks]
        self._keys.append([*keys, *ends, f"{step}/verdict"])
        # Of many steps the store keeps the messages of the last two: a process may still be leaving
        # the one before.
        while len(self._keys) > 2:
            for key in self._keys.popleft():
                self.store.delete_key(key)
        return {rank: problem for rank, problem in problems.items() if problem}

    def has_arrived(self, step: str, rank: int) -> bool:
        """For the first process: whether another waits for the step to begin."""
        return self.store.check([f"{step}/{rank}"])

    def report(self, step: str, rank: int, problem: str) -> None:
        """Reports how the step ended; for all but the first."""
        self._write(f"{step}/end/{rank}", problem)

    def has_reported(self, step: str, ranks: Sequence[int]) -> bool:
        """Whether ``reports`` need not wait."""
        return self.store.check([f"{step}/end/{rank}" for rank in ranks])

    def reports(self, step: str, ranks: Sequence[int]) -> dict[int, str]:
        """For the first process: waits for the reports of all ``ranks``."""
        return self._texts([f"{step}/end/{rank}" for rank in ranks], ranks)

    def _texts(self, keys: Sequence[str], ranks: Sequence[int]) -> dict[int, str]:
        return {rank: self._read(key) for rank, key in zip(ranks, keys, strict=True)}

    def _write(self, key: str, text: str) -> None:
        self.store.set(key, signature(self.secret, f"{key} {text}") + text)

    def _read(self, key: str) -> str:
        """Waits for the text. One that is signed with another secret counts as a problem."""
        message = self.store.get(key).decode()
        text = message[_SIGNATURE_LENGTH:]
        expected = signature(self.secret, f"{key} {text}")
        if hmac.compare_digest(message[:_SIGNATURE_LENGTH].encode(), expected.encode()):
            return text
        return "it does not know the secret of this run"


_SIGNATURE_LENGTH = 64


def signature(secret: str, text: str) -> str:
    """_SIGNATURE_LENGTH hexadecimal digits that only who knows ``secret`` can compute."""
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def combined(problems: Mapping[int, str]) -> str:
    """The problems of several ranks as one, equal ones once."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        if problem:
            ranks.setdefault(problem, []).append(rank)
    return "; ".join(
        f"rank {', '.join(map(str, affected))}: {problem}" for problem, affected in ranks.items()
    )


def serve_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A store served by this process at a free port (``.port``). Not through torch's rendezvous:
    under torchrun that would look for the agent's store instead of serving one."""
    return dist.TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process serves."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def peer_timeout_s(timeout_s: float) -> float:
    """How long a process waits for another inside of a command of ``timeout_s`` seconds: when one
    is lost, the others must have the time left to say so."""
    return timeout_s / 2


# Read when a group of NCCL is made. Without them ``wait`` does not wait for the device, the host
# stops where it reads a result that never comes, and in time the watchdog of the group ends the
# process: one server that dies would end the trainer and all other servers.
_NCCL_ERRORS_ARE_RAISED = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # ``wait`` raises at the time limit of the group
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # errors end no process; ``leave_group`` aborts
}


def join_group(
    store: dist.Store, rank: int, size: int, timeout_s: float, secret: str = ""
) -> dist.ProcessGroup:
    """Collective over the ``size`` processes that share ``store`` and ``secret``: gloo for the
    host's memory, NCCL for that of a GPU; errors of both are raised. Their addresses are in the
    store under names that follow from the secret: no process with another one gets in by mistake.

    This keeps no attacker out: the store has no password, lists its keys, and lets any
    process that reaches its port read, set and delete them. In a closed network only.

    ``timeout_s``: of the commands that the group is used in; see ``peer_timeout_s``.

    torch.distributed must be initialized, in each process with whatever world it has; its functions
    take the group like any other.
    """
    timeout = timedelta(seconds=peer_timeout_s(timeout_s))
    store = dist.PrefixStore(signature(secret, "group"), store)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType
    group._set_default_backend(kind.GLOO)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with restored_variables(_NCCL_ERRORS_ARE_RAISED):
            os.environ.update(_NCCL_ERRORS_ARE_RAISED)
            backend = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
        device = torch.device("cuda", torch.cuda.current_device())
        group._register_backend(device, kind.NCCL, backend)
    # torch translates a process's rank in its own world into its rank in the group. These processes
    # have no world in common, so only this one's own entry means anything; the other entries must
    # merely be there, one for each, and clash with nothing.
    own = dist.get_rank()
    global_to_group = {(own + i - rank) % max(size, own + 1): i for i in range(size)}
    distributed_c10d._world.pg_group_ranks[group] = global_to_group
    distributed_c10d._world.pg_map[group] = ("gloo", store)
    return group


def leave_group(group: dist.ProcessGroup, error: BaseException | None = None) -> None:
    """Forgets the group, also the references that the frames of ``error`` hold. With the last
    reference gloo closes its connections, and only then do peers that wait for this process learn
    that it will not come; so the caller drops its own as well. A frame without its locals still has
    its function: no function that ``error`` went through may close over the group.
    """
    distributed_c10d._world.pg_group_ranks.pop(group, None)
    distributed_c10d._world.pg_map.pop(group, None)
    group.abort()
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
