"""The global random generators of a process.

They are saved in checkpoints, and kept across code that seeds them or draws from them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture() -> State:
    """The state of ``random``, ``numpy.random`` and torch, on the CPU and this rank's device."""
    # Asking for the state of a device that was not used yet would start CUDA.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # numpy's words as plain integers: a checkpoint with an array in it could not be read without
    # unpickling its class.
    algorithm, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, words.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore(state: State) -> None:
    """Sets the generators to a state of ``capture``."""
    random.setstate(state["python"])
    algorithm, words, *rest = state["numpy"]
    np.random.set_state((algorithm, np.asarray(words, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Inside, anything may seed or draw; afterwards the generators are as they were."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
