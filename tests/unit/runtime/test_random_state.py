"""The global generators, saved and put back."""

import random

import numpy as np
import pytest
import torch

from megatron_rl.runtime.random_state import capture, preserved_random_state, restore


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def disturb() -> None:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    draw()


def test_inside_anything_goes():
    state = capture()
    want = draw()
    restore(state)
    with preserved_random_state():
        disturb()
    assert draw() == want


def test_kept_by_an_exception_too():
    state = capture()
    want = draw()
    restore(state)
    with pytest.raises(ZeroDivisionError), preserved_random_state():
        disturb()
        raise ZeroDivisionError
    assert draw() == want


def test_without_it_they_change():
    state = capture()
    want = draw()
    restore(state)
    disturb()
    assert draw() != want
