"""Imports the libraries once, then forks for every command line (the client: client.py).

    python -m tests.warm.server SOCKET DESCRIPTOR OWNER

Writes a byte to DESCRIPTOR when it listens on SOCKET. Ends, with all that runs on it, when the
process OWNER does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

# What a rank of a training imports; of this project nothing, so that each child imports its own.
LIBRARIES = (
    "torch",
    "torch.distributed.launcher.api",  # of torchrun, which itself runs as __main__
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers",
    "transformers.models.qwen2",
    "transformers.models.qwen3",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing.strategies.torch",
    "vllm",
    "vllm.entrypoints.llm",
    # Not its worker for a CPU, which puts functions of its own into torch.cuda: a rank may be asked
    # what it needs without them.
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "hydra",
    "jaxtyping",
    "matplotlib.pyplot",
    "pyarrow.parquet",
    "rich.progress",
)


class Request(NamedTuple):
    """A command line, without the name of Python, and the place it runs in."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    streams: list[int]  # descriptors of standard input, output and error


@dataclass
class Child:
    pid: int
    client: socket.socket

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it had no process group of its own yet
            os.killpg(self.pid, signal.SIGKILL)


def serve(path: str, ready: int, owner: int) -> Request:
    """Answers clients until the process is ended. Returns in a child only: what it is to run."""
    end = os.pidfd_open(owner)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    os.write(ready, b"1")
    os.close(ready)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(end, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj == end:
                _kill_all(events)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request = _received(client)
                pid = os.fork()
                if pid == 0:
                    for open_here in events.get_map().values():
                        os.close(open_here.fd)
                    return request
                for stream in request.streams:
                    os.close(stream)
                client.sendall(struct.pack("!i", pid))
                child = Child(pid, client)
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, child)
                events.register(client, selectors.EVENT_READ, child)
            elif isinstance(key.fileobj, socket.socket):
                if key.fileobj.fileno() >= 0:  # else the child has ended in the same moment
                    events.unregister(key.fileobj)  # the client was killed
                    key.data.kill()
            else:
                events.unregister(key.fileobj)
                os.close(key.fd)
                _report(key.data, events)


def _kill_all(events: selectors.BaseSelector) -> NoReturn:
    for key in events.get_map().values():
        if isinstance(key.data, Child):
            key.data.kill()
    os._exit(0)


def _received(client: socket.socket) -> Request:
    head, streams, _, _ = socket.recv_fds(client, 4, 3, socket.MSG_WAITALL)
    length = struct.unpack("!I", head)[0]
    return Request(**json.loads(client.recv(length, socket.MSG_WAITALL)), streams=streams)


def _report(child: Child, events: selectors.BaseSelector) -> None:
    """Tells the client how the child ended."""
    _, status = os.waitpid(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if child.client in events.get_map():
        events.unregister(child.client)
        with suppress(BrokenPipeError):
            child.client.sendall(struct.pack("!i", code))
    child.client.close()


def become(request: Request, paths: list[str]) -> None:
    """Makes this process what a start of Python would have made. ``paths``: those of libraries."""
    os.setsid()
    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
    for stream in request.streams:
        os.close(stream)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    added = request.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, added), *paths]
    # The child may work on another copy of the tree, and wandb makes a folder at its import that
    # goes with the first process that ends.
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "wandb")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    import numpy as np

    np.random.seed()


def run(argv: list[str]) -> NoReturn:
    """The script or module as ``__main__``, to its end."""
    words = argv[1:] if argv[0] == "-u" else argv
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 (what Python does with it)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # As at the end of Python, but for the libraries: to take them apart would touch, and so copy,
    # every page shared with the server, which costs seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def main(path: str, ready: int, owner: int) -> None:
    own = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep)]
    paths = [entry for entry in sys.path if entry not in own]
    gc.disable()
    runpy.run_path("megatron_rl/policy/__init__.py")  # what megatron needs before it is imported
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would touch the pages of all of them
    request = serve(path, ready, owner)
    gc.enable()
    become(request, paths)
    run(request.argv)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
