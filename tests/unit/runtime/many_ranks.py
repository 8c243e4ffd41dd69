"""One rank of many: its process alone is under the limit, the other ranks are threads of another.

many_ranks.py first RANKS GROUPS SOFT_LIMIT RAISED, which starts many_ranks.py others RANKS GROUPS
PORT. The groups are gloo's. They connect a pair of ranks when it first talks, so that the others,
which do not talk to each other, need no mesh; the first rank talks to all, and so holds what it
holds in a mesh.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=240)


def group_of(store: dist.Store, rank: int, size: int, device: Any) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._threads = 1
    options._devices = [device]
    return dist.ProcessGroupGloo(store, rank, size, options)


def local_device() -> Any:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)


def first(size: int, groups: int, soft_limit: int, raised: bool) -> None:
    from megatron_rl.runtime.open_files import raise_limit

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    words = [sys.executable, __file__, "others", str(size), str(groups), str(store.port)]
    with subprocess.Popen(words) as others:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))
            if raised:
                raise_limit(os.getpid())
            before = len(os.listdir("/proc/self/fd"))
            device = local_device()
            kept = []
            for number in range(groups):
                group = group_of(dist.PrefixStore(str(number), store), 0, size, device)
                for peer in range(1, size):
                    group.send([torch.tensor([peer])], peer, 0).wait()
                kept.append(group)
            print(f"connected to {len(os.listdir('/proc/self/fd')) - before}", flush=True)
            store.set("done", "")
            others.wait(60)
        finally:
            others.kill()


def main() -> None:
    role, *numbers = sys.argv[1:]
    if role == "first":
        size, groups, soft_limit, raised = map(int, numbers)
        first(size, groups, soft_limit, bool(raised))
    else:
        others(*map(int, numbers))


def others(size: int, groups: int, port: int) -> None:
    from megatron_rl.runtime.open_files import raise_limit

    raise_limit(os.getpid())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    device = local_device()
    kept = []
    threading.stack_size(1 << 18)

    def join(rank: int, number: int) -> None:
        group = group_of(dist.PrefixStore(str(number), store), rank, size, device)
        received = torch.zeros(1, dtype=torch.long)
        group.recv([received], 0, 0).wait()
        assert received.item() == rank
        kept.append(group)

    for number in range(groups):
        threads = [threading.Thread(target=join, args=(rank, number)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store.get("done")
    os._exit(0)


if __name__ == "__main__":
    main()
