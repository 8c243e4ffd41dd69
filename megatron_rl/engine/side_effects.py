"""What importing, building and running vLLM does to the process around it, prepared and undone:
its environment, its CUDA streams, its segments of shared memory."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.model_config import read_json
from megatron_rl.runtime.process import restored_variables

DIRECTORY = Path("/dev/shm")
PREFIX = "megatron_rl-"  # of the segments there
_OLD_S = 3600.0  # no start of an engine takes as long

# vLLM sets these for its own workers. Processes that are started later (a reward verifier) would
# inherit them, and launchers read some of them.
_RESTORED_VARIABLES = (
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "LD_LIBRARY_PATH",
    "NUMEXPR_MAX_THREADS",
)


def prepare_import(*, batch_invariant: bool) -> None:
    """Sets what vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(batch_invariant))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        # Otherwise small sampling functions are compiled, which takes seconds and a C++ compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # It warns that there is no Triton, which a CPU does not need.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Restores environment variables and torch's number of threads after building an engine.

    vLLM replaces ``torch.set_num_threads`` by a function that does nothing, so the function itself
    is put back first.
    """
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        with restored_variables(_RESTORED_VARIABLES):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def import_model_class(model_path: str) -> None:
    """Imports the class of the model, as this process must. vLLM would ask a process of its own
    first what it can do, which imports all of vLLM again; once for each cache folder and class."""
    file = Path(model_path) / "config.json"
    if not file.is_file():  # vLLM says so
        return
    from vllm.model_executor.models.registry import (
        ModelRegistry,
        _LazyRegisteredModel,
        _RegisteredModel,
    )

    for name in read_json(file).get("architectures") or ():
        entry = ModelRegistry.models.get(name)
        if isinstance(entry, _LazyRegisteredModel):
            ModelRegistry.models[name] = _RegisteredModel.from_model_cls(entry.load_model_cls())


def unlink_broadcast_buffer() -> None:
    """Removes the name of the tensor-parallel group's shared buffer.

    Every rank has mapped it when the engine is built. Without a name the memory goes with the last
    process, however that ends, and nothing reports it as leaked.
    """
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():
        return
    queue = get_tp_group().mq_broadcaster
    buffer = None if queue is None else queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False


class EngineStream:
    """A stream of the engine's own, in which it is built and every call is made.

    vLLM keeps the stream that it works in: it captures CUDA graphs there, which the default stream
    cannot, and its copies to the host wait for the stream of its first step. A communicator or a
    capture that finds the default stream therefore sets a new current stream for the whole thread.
    The policy's gradients, on the other hand, belong to the stream of their parameters: in another
    one autograd would wait for one event per parameter.

    Without a CUDA device nothing happens.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the current stream is the engine's.

        It waits for what the caller had queued; afterwards, also after an exception, the caller's
        stream is current again and waits for what was queued inside. vLLM must have been imported
        before: it only learns of streams that are set after its import.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
                # If vLLM has set another one after all, its graphs and copies belong to that.
                self._stream = torch.cuda.current_stream()
        finally:
            caller.wait_stream(self._stream)


@contextmanager
def private_segments(launch_id: str) -> Iterator[None]:
    """Collective. Segments created inside, between the tensor-parallel ranks of a CPU engine, get
    names unique to ``launch_id``, which are removed after; those that a launch left which was
    killed inside are removed an hour later.

    Under the external launcher vLLM gives them one constant name: two jobs on a host collide, and a
    killed job leaves segments that stop the next one. A name is needed only while the engine
    starts: until every rank has mapped the segment.
    """
    assert launch_id.isalnum(), (
        f"launch id {launch_id!r}: letters and digits only, it becomes part of a file name"
    )
    from vllm.distributed.device_communicators.cpu_communicator import (
        _CPUSHMDistributed as Communicator,
    )

    original = Communicator.make_group_name
    remove_old_segments()
    Communicator.make_group_name = staticmethod(
        lambda group: f"{PREFIX}{launch_id}-{group.unique_name}-{group.ranks[0]}"
    )
    try:
        dist.barrier()
        yield
        dist.barrier()  # every rank has mapped them
    finally:
        Communicator.make_group_name = original
        for path in DIRECTORY.glob(f"{PREFIX}{launch_id}-*"):
            path.unlink(missing_ok=True)


def remove_old_segments() -> None:
    """Removes segments of this project and this user that a killed start of an engine left."""
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another launch removes it, too
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S:
                path.unlink()
