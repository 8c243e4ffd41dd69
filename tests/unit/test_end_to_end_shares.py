"""tools/bench/end_to_end.py: the share of a product's rate that a phase reaches, by hand."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from tests.test_size import REPO


@pytest.fixture
def program(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPO / "tools/bench"))
    spec = importlib.util.spec_from_file_location("e2e", REPO / "tools/bench/end_to_end.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "e2e", module)
    spec.loader.exec_module(module)
    return module


def test_matrices_count_and_an_untied_embedding_does_not(program, tmp_path):
    tensors = {"model.embed_tokens.weight": torch.ones(5, 2), "model.norm.weight": torch.ones(2)}
    tensors["q"] = torch.ones(2, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert program.product_parameters(tmp_path) == 16  # the embedding is the head
    save_file(tensors | {"lm_head.weight": torch.ones(5, 2)}, tmp_path / "model.safetensors")
    assert program.product_parameters(tmp_path) == 16


def test_an_update_takes_three_products_of_every_token(program):
    """100 + 20 tokens of 0.01 s a token (both cores at their rate): 3.6 s of products in 4.5."""
    steps = [{"tokens": 100, "update": 4.5, "rollout": 4.8}] * 3
    assert program.shares("x", steps, 0.01, 20) == (
        "x: update 4.500 s, 80%; rollout 4.800 s, 25% of the rate of a float32 product"
    )
