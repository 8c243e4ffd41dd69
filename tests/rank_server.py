"""Imports torch and megatron once, then forks the ranks of every call (the client: tests/ranks.py).

The fork happens before a process group, a thread or a random number exists. A rank writes its
output and its result to files, and ends by ``os._exit``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.ranks import FAILED, Failure, Request, Start

PR_SET_PDEATHSIG = 1


def serve(client: Connection) -> None:
    """Answers one call after another until the client goes away."""
    _die_with_parent()
    gc.disable()
    _import_once()
    client.send("ready")
    while True:
        try:
            start: Start = client.recv()
        except EOFError:
            return
        try:
            # Here and not on the ranks: what the module imports is then there for later calls.
            importlib.import_module(start.module)
            gc.freeze()  # a collection on a rank would touch, and so copy, the pages of all of them
        except Exception as error:  # noqa: BLE001 (raised again by the client)
            client.send(Failure(error, traceback.format_exc(), time.time()))
            continue
        pids = [_fork(start, rank, client) for rank in range(start.count)]
        client.send(pids)
        for _ in pids:
            pid, status = os.wait()
            client.send((pids.index(pid), os.waitstatus_to_exitcode(status)))


def _client() -> Connection:
    """Standard input; who reads there from now on finds nothing."""
    client = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return client


def _import_once() -> None:
    """What nearly every call needs."""
    import torch
    from transformers import (  # noqa: F401
        LlamaForCausalLM,
        MistralForCausalLM,
        MixtralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )

    import megatron_rl.policy.megatron_policy  # noqa: F401

    torch.set_num_threads(1)


def _die_with_parent() -> None:
    """No rank outlives a session that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(start: Start, rank: int, client: Connection) -> int:
    """The process id of a new rank."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        os.setsid()
        _die_with_parent()
        client.close()
        _redirect(Path(start.folder) / f"{rank}.output")
        code = _run(start, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the server's own exit handlers are not this rank's


def _redirect(output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1)  # the client asks where a rank hangs


def _run(start: Start, rank: int) -> int:
    """Runs the function of the call in a new process group and writes down what came of it."""
    import torch
    import torch.distributed as dist

    gc.enable()
    # Makes the thread pool anew, which a fork loses. Left to the first threads that compute, of two
    # at once one may meet none: "Invalid thread pool!".
    torch.set_num_threads(1)
    try:
        _join(start, rank)
        result = _call(pickle.loads(start.request))
        content, code = pickle.dumps(result), 0
    except BaseException as error:  # noqa: BLE001 (raised again by the client)
        text = traceback.format_exc()
        print(text, flush=True)
        content, code = pickle.dumps(_failure(error, text)), FAILED
    file = Path(start.folder) / f"{rank}.result"
    file.with_suffix(".partial").write_bytes(content)
    file.with_suffix(".partial").rename(file)
    if code == 0:
        dist.barrier()  # a rank that leaves early would close the connections of the others
    return code


def _join(start: Start, rank: int) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    size = str(start.count)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(start.port))
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    # The client's limit comes first: it says where each rank stands.
    limit = timedelta(seconds=start.timeout + 60)
    store = dist.TCPStore("127.0.0.1", start.port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(start.prefix, store),
        rank=rank,
        world_size=start.count,
        timeout=limit,
    )


def _call(request: Request) -> Any:
    module = importlib.import_module(request.module)
    function = reduce(getattr, request.name.split("."), module)
    # The name of a decorated test is that of its wrapper, which would ask for ranks again.
    function = getattr(function, "__wrapped__", function)
    return function(*request.args, **request.kwargs)


def _failure(error: BaseException, text: str) -> Failure:
    """The exception, or its text where it does not survive pickling or would end the session."""
    as_text = RuntimeError(f"{type(error).__name__}: {error}")
    failure = Failure(as_text, text, time.time())
    if isinstance(error, Exception) and _survives(error):
        return failure._replace(error=error)
    return failure


def _survives(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception as trouble:  # noqa: BLE001 (a class may fail here in any way)
        print(f"{type(error).__name__} cannot be pickled: {trouble}", flush=True)
        return False


if __name__ == "__main__":
    serve(_client())
