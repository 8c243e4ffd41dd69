"""Parts of the GPU programs that need no GPU: the number of operations of an update, what is
compared with what, rows of reports."""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib import import_module

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.launch import REPO

sys.path.append(str(REPO / "tools/bench"))  # a program finds what lies beside it
gpu_model = import_module("gpu_model")
gpu_policy = import_module("gpu_policy")
gpu_probe = import_module("gpu_probe")
gpu_steps = import_module("gpu_steps")
gpu_tests = import_module("gpu_tests")

SHAPE = argparse.Namespace(
    layers=3, hidden=64, ffn=176, heads=4, kv_heads=2, vocab=500, sequences=2, length=40
)


def test_operations_of_a_forward_are_those_torch_counts():
    """torch counts attention over the whole square, which is twice the causal half."""
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(2, 40, dtype=torch.long))
    square = 2 * 3 * 2 * (2 * 40 * 40 * 64)  # sequences, layers, products
    # Rotary angles are a product as well, of one column.
    angles = 2 * 2 * 40 * (64 // 4 // 2)
    expected = gpu_policy.forward_flops(SHAPE, response_tokens=2 * 40) + square // 2
    assert counter.get_total_flops() - expected in (0, angles // 2, angles)


def test_operations_of_an_update_by_hand():
    """An 8B shape, one layer: 2 x 218,103,808 for a token in the matrices of the layer."""
    shape = argparse.Namespace(**gpu_model.SHAPE_8B, sequences=1, length=2048)
    shape.layers = 1
    layer = 4096 * (4096 + 4096 + 2 * 1024 + 3 * 14336)
    assert layer == 218_103_808
    forward = 2 * 2048 * (layer + 4096 * 2048) + 2 * 1792 * 4096 * 128256
    assert gpu_policy.update_flops(shape) == 3 * forward


def test_formats_are_compared_with_bf16():
    rows = [
        {"precision": "bf16", "update_s": 3.0},
        {"precision": "fp8", "update_s": 2.0},
        {"precision": "mxfp8", "refused": "no"},
    ]
    assert [row.get("x bf16") for row in gpu_policy.against_bf16(rows)] == [1.0, 1.5, None]
    assert "x bf16" not in gpu_policy.against_bf16([{"precision": "fp8", "update_s": 2.0}])[0]


def test_kernels_are_listed_by_their_time():
    square = torch.randn(64, 64)
    rows = gpu_policy.top_kernels(lambda: [square @ square for _ in range(5)], 3)
    assert len(rows) == 3 and [row["ms"] for row in rows] == sorted(
        (row["ms"] for row in rows), reverse=True
    )
    assert any("mm" in row["kernel"] and row["calls"] == 5 for row in rows)


def test_waits_are_counted_by_their_place(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with gpu_model.host_waits() as found:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered by x)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((where, count),) = found.items()
    assert where.startswith("tests/unit/test_gpu_programs.py:") and count == 3
    assert modes == ["warn", "default"]


def test_attention_by_hand_is_that_of_whole_sequences():
    """Two sequences, packed, against masked attention over the whole square with rotations as
    complex numbers."""
    draw = torch.Generator().manual_seed(0)
    lengths, dim = [3, 5], 8
    query, key, value = (torch.randn(8, 2, dim, generator=draw) for _ in range(3))
    positions = torch.cat([torch.arange(length) for length in lengths]).float()
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(5).float()[:, None] * frequencies
    found = gpu_probe.attention_by_hand(
        query, key, value, torch.cat([angles, angles], dim=-1), lengths
    )
    turn = torch.polar(torch.ones(8, 4), positions[:, None] * frequencies)[:, None]
    q, k = (torch.complex(x[..., :4], x[..., 4:]) * turn for x in (query, key))
    scores = torch.einsum("qhd,khd->hqk", q, k.conj()).real / dim**0.5
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    visible = (owner[:, None] == owner[None]) & torch.ones(8, 8).tril().bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
    assert torch.allclose(found, expected, atol=1e-5)


def test_outcomes_of_probes(capsys):
    def passes(_):
        return "fine"

    def lacks(_):
        raise gpu_probe.Absent("no CUDA device")

    def fails(_):
        raise AssertionError("3 is not 4\nmore")

    rows = [gpu_probe.tried(probe, argparse.Namespace()) for probe in (passes, lacks, fails)]
    assert [(row["outcome"], row["detail"]) for row in rows] == [
        ("PASS", "fine"),
        ("SKIP", "no CUDA device"),
        ("FAIL", "AssertionError: 3 is not 4"),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "PASS passes: fine",
        "SKIP lacks: no CUDA device",
        "FAIL fails: AssertionError: 3 is not 4",
    ]


def test_a_difference_that_is_too_large_fails_a_probe():
    assert gpu_probe.close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0) == 0.0
    with pytest.raises(AssertionError, match=r"relative difference 5\.00e-01, more than 0\.1"):
        gpu_probe.close(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), 0.1)


REPORT = """<testsuites><testsuite><testcase name="a" time="1.5"/>
<testcase name="b" time="2"><failure message="no\n such | thing">text</failure></testcase>
<testcase name="c" time="0"><skipped message="no CUDA device"/></testcase>
</testsuite></testsuites>"""


def test_rows_of_a_report_of_pytest():
    assert gpu_tests.outcomes(REPORT) == [
        {"test": "a", "outcome": "passed", "seconds": 1.5},
        {"test": "b", "outcome": "failure: no such / thing", "seconds": 2.0},
        {"test": "c", "outcome": "skipped: no CUDA device", "seconds": 0.0},
    ]


def test_what_is_held_beside_tensors():
    row = {
        f"memory/sleep_{what}_gib": value
        for what, value in (("used", 9.0), ("allocated", 2.5), ("engine", 1.5))
    }
    ((found,),) = gpu_steps.beside_tensors(row)
    assert found["beside tensors, GiB"] == 5.0
    assert gpu_steps.beside_tensors({"memory/sleep_host_gib": 1.0}) == []
