"""The global random generators of a process: saved in checkpoints, kept across code that reseeds or consumes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture() -> State:
    """The state of ``random``, ``numpy.random`` and torch (CPU and, where CUDA was used already, this rank's device)."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # numpy's words as plain integers: a checkpoint with an array in it could not be read without unpickling its class.
    kind, words, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": (kind, words.tolist(), *rest), "torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: State) -> None:
    """The inverse of ``capture``."""
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(words, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Inside, anything may seed or draw; on leaving, also by an exception, the generators are as they were."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
