"""What vLLM returns of its routers becomes bytes, or an error where it is no choice of experts."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from vllm import triton_utils
from vllm.distributed.aux_output_connector import worker

from megatron_rl import serve
from megatron_rl.engine.arguments import engine_arguments, served_settings
from megatron_rl.engine.routed_experts import TokensOf, packed_rows
from tests.unit.config.made_configs import config

REPLAYED = ("rollout=vllm_cpu", "precision=fp32", "rollout.router_replay=rollout")
# Two tokens that were inputs, two layers, two experts each.
RETURNED = np.array([[[3, 1], [0, 2]], [[1, 0], [2, 5]]], np.uint8)


def test_bytes_by_hand() -> None:
    """The last token was sampled alone."""
    three = TokensOf(num_tokens=3, width=4, what="prompt p")
    found = packed_rows(RETURNED, three)
    assert found.tolist() == [[3, 1, 0, 2], [1, 0, 2, 5], [255] * 4] and found.dtype == np.uint8
    later = packed_rows(np.concatenate([RETURNED, RETURNED[:1]]), three)
    assert later.tolist() == found.tolist(), "an engine that was one token ahead"
    dense = np.concatenate([RETURNED * 0, RETURNED], axis=1)  # a first layer without experts
    assert packed_rows(dense, three).tolist() == found.tolist()
    with pytest.raises(RuntimeError, match="zeros in the place of experts"):
        packed_rows(dense, three._replace(width=6))  # of a model whose three layers have experts
    wide = packed_rows(np.array([[[3, 300]]], np.uint16), TokensOf(2, 4, "prompt p"))
    assert wide.tolist() == [[3, 0, 44, 1], [255] * 4]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "prompt p: vLLM returned no experts"),
        (RETURNED[:1], "experts of 1 of 2 tokens"),
        (RETURNED * 0, "zeros in the place of experts"),
        (RETURNED * np.array([[[1]], [[0]]], np.uint8), "zeros"),  # of one token
        (RETURNED * np.array([[[1], [0]]], np.uint8), "zeros"),  # of one layer
    ],
)
def test_what_is_no_choice_is_an_error(returned: np.ndarray | None, words: str) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        packed_rows(returned, TokensOf(3, 4, "prompt p"))
    assert "rollout.router_replay=old_policy" in str(caught.value)


def test_a_server_without_triton_refuses() -> None:
    settings = config(*REPLAYED, "source=servers")
    with pytest.raises(ValueError, match="router_replay = rollout: vLLM's server returns experts"):
        serve.serve(settings, argparse.Namespace())


def test_with_triton_vllm_returns_them_on_every_rank(monkeypatch) -> None:
    monkeypatch.setattr(worker, "get_tp_group", worker.get_tp_group)
    rollout = config(*REPLAYED).rollout
    assert "enable_return_routed_experts" not in engine_arguments("m", rollout, 3)
    monkeypatch.setattr(triton_utils, "HAS_TRITON", True)
    assert engine_arguments("m", rollout, 3)["enable_return_routed_experts"] is True
    assert worker.get_tp_group().is_first_rank


def test_a_server_says_whether_it_returns_them() -> None:
    assert served_settings(config(*REPLAYED).rollout)["rollout.router_replay"] == "rollout"
    other = config(*REPLAYED[:2], "rollout.router_replay=old_policy").rollout
    assert "rollout.router_replay" not in served_settings(other)
