"""What importing and building vLLM does to the process around it, prepared and undone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
    environment = {name: os.environ[name] for name in _RESTORED_VARIABLES if name in os.environ}
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        for name in _RESTORED_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)


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
