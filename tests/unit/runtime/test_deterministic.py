"""What ``trainer.deterministic`` sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.policy.model import transformer_config
from megatron_rl.runtime.device import DETERMINISTIC, make_deterministic
from tests.numerics.policy_cases import parallel
from tests.unit.small_models import DENSE, precision


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_torch_its_libraries_and_megatron_are_told() -> None:
    assert not transformer_config(DENSE, parallel(), precision()).deterministic_mode
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    make_deterministic(environment)
    assert environment == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    assert torch.are_deterministic_algorithms_enabled()
    assert transformer_config(DENSE, parallel(), precision()).deterministic_mode


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_variable_that_says_otherwise_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.deterministic = true and {name}=1: set it to"):
        make_deterministic({name: "1"})
    assert not torch.are_deterministic_algorithms_enabled()
