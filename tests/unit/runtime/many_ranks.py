"""Groups of many ranks on one machine under a low limit on open files: joined as torch alone does,
and as a run does.

    python many_ranks.py RANKS FILES

The ranks are forked from one process that has imported what they need; a torchrun would import it
once for each. Every eight of them take themselves for a machine of its own, as the
heartbeat of a run asks the kernel for each other rank of its machine. Every rank joins the launch,
makes two gloo groups of all ranks (those of Megatron-Core and of vLLM), and passes a barrier in
each. One that fails ends all; the exit code is 1 when the last way that was tried has failed.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron_rl.runtime import launch
from megatron_rl.runtime.open_files import raise_limit

NUM_GROUPS = 2
RANKS_PER_HOST = 8
LIMIT = timedelta(minutes=30)


def join_as_torch() -> None:
    dist.init_process_group("gloo", timeout=LIMIT)


JOIN: dict[str, Callable[[], object]] = {"torch": join_as_torch, "a run": launch.start}


def rank_main(join: Callable[[], object], files: int) -> None:
    """In the process of a rank; its environment is that of a torchrun."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    join()
    groups = [dist.new_group(backend="gloo", timeout=LIMIT) for _ in range(NUM_GROUPS)]
    for group in groups:
        dist.barrier(group)
    if dist.get_rank() == 0:
        opened = len(os.listdir("/proc/self/fd"))
        print(f"{dist.get_world_size()} ranks, rank 0 with {opened} open files", flush=True)
    dist.barrier()


def fork_rank(rank: int, join: Callable[[], object], files: int) -> int:
    """The number of the new process."""
    child = os.fork()
    if child:
        return child
    host = rank // RANKS_PER_HOST
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % RANKS_PER_HOST), GROUP_RANK=str(host))
    socket.gethostname = lambda: f"host{host}"
    code = 1
    try:
        rank_main(join, files)
        code = 0
    except BaseException:  # noqa: BLE001  # nothing of the parent may run on in its copy
        traceback.print_exc()
    finally:
        os._exit(code)


def run(how: str, ranks: int, files: int) -> bool:
    """Whether all ranks ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(RANKS_PER_HOST))
    # As under a torchrun: the store is served by the parent of the ranks.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    alive: set[int] = set()
    try:
        for rank in range(ranks):
            alive.add(fork_rank(rank, JOIN[how], files))
        store = dist.TCPStore("127.0.0.1", port, None, True, timeout=LIMIT, wait_for_workers=False)
        works = all_end_well(alive)
        del store
    finally:
        for child in alive:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return works


def all_end_well(alive: set[int]) -> bool:
    """Waits until all have ended, or one has failed; those that have ended are taken out."""
    while alive:
        child, status = os.wait()
        alive.discard(child)
        if status:
            return False
    return True


def main() -> None:
    ranks, files = map(int, sys.argv[1:])
    raise_limit(os.getpid())  # it serves the store: a connection for each rank
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that forked ranks share these pages
    for how in JOIN:
        works = run(how, ranks, files)
        print(f"joined as {how}: {'works' if works else 'fails'} with {ranks} ranks", flush=True)
    sys.exit(not works)


if __name__ == "__main__":
    main()
