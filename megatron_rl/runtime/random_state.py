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
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: State) -> None:
    """The inverse of ``capture``."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
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
