"""Qwen3-Next without an engine: the gated delta net's stand-ins against plain loops and
transformers, no state between sequences, orders of tensors, sizes as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.load import compose
from megatron_rl.config.rules.engine_checks import state_bytes, token_bytes
from megatron_rl.config.rules.layout_rules import layout_problems
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import layer_parameters, part_of, shards, tensor_slices
from megatron_rl.models.problems import family_problems
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.policy.activations import linear_activations
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes import linear_attention as ours
from tests.numerics.policy_cases import parallel
from tests.unit.policy.test_families import read
from tests.zoo import configured, save_tiny_model
from tools.plan_sync import architecture

LENGTHS = [1, 3, 64, 65, 130, 2]


def inputs(lengths: list[int], heads: int = 3) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta of packed sequences, and their boundaries."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((heads, 8), (heads, 8), (heads, 6), (heads,), (heads,))
    q, k, v, g, beta = (torch.randn(1, sum(lengths), *shape, generator=draw) for shape in shapes)
    found = [ours.l2norm(q), ours.l2norm(k), v, -F.softplus(g), beta.sigmoid()]
    boundaries = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return [each.requires_grad_() for each in found], boundaries


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule as its paper has it, ``[tokens, heads, dim]``."""
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        new = beta[t][:, None] * (v[t] - seen)
        state = state + torch.einsum("hk,hv->hkv", k[t], new)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[2] ** 0.5)
    return torch.stack(outputs)


def packed(values: list[Tensor], boundaries: Tensor) -> Tensor:
    q, k, v, g, beta = values
    return ours.delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=boundaries)[0]


def test_the_rule_by_chunks_is_the_one_token_by_token() -> None:
    """Result and gradients, of sequences around the length of a chunk; and as transformers."""
    values, boundaries = inputs(LENGTHS)
    wide = [each.detach().double().requires_grad_() for each in values]
    each = zip(*(x[0].split(LENGTHS) for x in wide), strict=True)
    wanted = torch.cat([token_by_token(*sequence) for sequence in each])[None]
    got = packed(values, boundaries)
    torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-5)
    of_theirs = []
    for q, k, v, g, beta in zip(*(x.split(LENGTHS, 1) for x in values), strict=True):
        of_theirs.append(theirs.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0])
    torch.testing.assert_close(got, torch.cat(of_theirs, 1), atol=1e-6, rtol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((got * weights).sum(), values)
    expected = torch.autograd.grad((wanted * weights).sum(), wide)
    for mine, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=3e-6, rtol=1e-4)


def test_one_token_by_hand() -> None:
    """S = k beta v^T: o = (q . k) beta v / sqrt(2)."""
    q, k, v = (torch.tensor(x).view(1, 1, 1, 2) for x in ([1.0, 2.0], [0.5, 0.25], [3.0, -1.0]))
    g, beta = torch.tensor([[[-9.0]]]), torch.tensor([[[0.5]]])
    got = packed([q, k, v, g, beta], torch.tensor([0, 1]))
    torch.testing.assert_close(got[0, 0, 0], torch.tensor([1.5, -0.5]) / 2**0.5)


def convolved(x: Tensor, boundaries: Tensor, weight: Tensor) -> Tensor:
    return ours.causal_conv(x, weight, None, cu_seqlens=boundaries)[0]


def test_the_filter_is_that_of_each_sequence_alone() -> None:
    lengths = [1, 3, 9]
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 13, 5, generator=draw), torch.randn(5, 4, generator=draw)
    plain = [
        F.silu(F.conv1d(F.pad(part.mT, (3, 0)), weight[:, None], groups=5)).mT
        for part in x.split(lengths, 1)
    ]
    got = convolved(x, torch.tensor([0, 1, 4, 13]), weight)
    torch.testing.assert_close(got, torch.cat(plain, 1))
    by_hand = weight[:, 3] * x[0, 2] + weight[:, 2] * x[0, 1]  # of the second sequence's second
    torch.testing.assert_close(got[0, 2], F.silu(by_hand))


def leak(rule: Any, conv: Any) -> bool:
    """Whether other tokens before a sequence, or behind it, change its results."""
    values, boundaries = inputs([70, 5, 8])
    others = [torch.cat([x[:, :70].flip(1), x[:, 70:75], x[:, 75:].flip(1)], 1) for x in values]
    weight = torch.ones(6, 4)
    found = [
        (rule(x, boundaries)[:, 70:75], conv(x[2][:, :, 0], boundaries, weight)[:, 70:75])
        for x in (values, others)
    ]
    return not all(map(torch.equal, *found))


def test_no_state_passes_from_one_sequence_to_the_next() -> None:
    """And a rule, or a filter, that takes the packed tokens for one sequence is caught."""

    def as_one(function: Any) -> Any:
        return lambda x, boundaries, *rest: function(x, boundaries[[0, -1]], *rest)

    assert not leak(packed, convolved)
    assert leak(as_one(packed), convolved)
    assert leak(packed, as_one(convolved))


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_the_first_matrix_are_where_megatron_splits_them(size: int) -> None:
    """HF has them by key head; a tensor rank has its queries, keys, values, gates, rates, decays.
    Every row carries its number."""
    arch = read("Qwen3Next")  # 2 key heads of 16, 4 value heads of 24
    (matrix,) = (p for p in layer_parameters(arch, 0) if p.slot.megatron.endswith("in_proj.weight"))
    wide = torch.arange(2 * 2 * (16 + 48)).view(2, -1)
    qkvz = torch.split(wide, [16, 16, 48, 48], 1)
    rates = torch.split(1000 + torch.arange(8).view(2, -1), [2, 2], 1)
    wanted = [torch.cat([x[r::size].flatten() for x in (*qkvz, *rates)]) for r in range(size)]
    whole = {matrix.names[0]: wide.view(-1, 1), matrix.names[1]: 1000 + torch.arange(8).view(-1, 1)}
    for rank in range(size):
        local = torch.full((264 // size, 64), -1)
        for shard in shards(matrix, arch, 128, rank, size):
            rows = whole[shard.name].expand(shard.full)
            part_of(local, shard).copy_(rows[tensor_slices(shard)])
        assert torch.equal(local, wanted[rank][:, None].expand(-1, 64))


def test_gates_of_attention_stand_behind_the_queries_of_a_group() -> None:
    arch = read("Qwen3Next")  # 4 heads of 16, 2 key-value heads
    (matrix,) = (p for p in layer_parameters(arch, 1) if "linear_qkv" in p.slot.megatron)
    pieces = [
        (s.name.split(".")[-2], s.start[0], s.shape[0]) for s in shards(matrix, arch, 128, 1, 2)
    ]
    assert pieces == [
        *(("q_proj", first, 16) for first in (64, 96, 80, 112)),
        ("k_proj", 16, 16),
        ("v_proj", 16, 16),
    ]


def test_parameters_of_the_published_model() -> None:
    """Counted by hand: 48 layers, hidden 2048, 512 experts of 512 and a shared one."""
    hidden = 2048
    delta = hidden * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 2 * 32 + 128 + 4096 * hidden
    attention = hidden * (2 * 4096 + 2 * 512) + 2 * 256 + 4096 * hidden
    experts = 513 * 3 * hidden * 512 + 512 * hidden + hidden
    layers = 36 * delta + 12 * attention + 48 * (experts + 2 * hidden)
    (counts,) = stage_counts(architecture("qwen3-next-80b"), parallel(), 1)
    assert counts.total == layers + 2 * 151936 * hidden + hidden == 79_674_391_296
    halves = stage_counts(architecture("qwen3-next-80b"), parallel(pipeline=2), 1)
    assert sum(each.total for each in halves) == counts.total
    assert architecture("qwen3-next-80b").kind(3) == (True, False)


def test_what_planners_ask() -> None:
    """Bytes of the engine's cache, and multiplications of a token, by hand."""
    arch = architecture("qwen3-next-80b")
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "dtype": "bfloat16", "stop": ()})
    assert token_bytes(rollout, arch) == 12 * 2 * 2 * 256 * 2
    assert state_bytes(rollout, arch) == 36 * (32 * 128 * 128 + 3 * 8192) * 4
    assert arch.linear.products == 32 * (3 * 128 * 128 + 64 * (2.5 + 1.5) * 128)
    delta = 2048 * (12288 + 64) + 4096 * 2048
    attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    experts = 11 * 3 * 2048 * 512 + 512 * 2048 + 2048
    matrices = 36 * (delta + arch.linear.products) + 12 * attention + 48 * experts
    assert WorkModel.of(arch).crossover_tokens == (matrices + 151936 * 2048) // (12 * 4096)


def test_numbers_that_the_stand_ins_keep_for_their_backward() -> None:
    linear, tokens, saved = read("Qwen3Next").linear, 512, {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    filtered, group, wide = linear.filtered, 2, 4 * 24
    inputs = torch.randn(1, tokens, filtered + wide + 8).requires_grad_()
    filters, boundaries = torch.randn(filtered, 4).requires_grad_(), torch.tensor([0, tokens])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        x, gate, rate, decay = (inputs * 1.0).split([filtered, wide, 4, 4], -1)
        x = convolved(x, boundaries, filters)
        keys, v = x.split([64, wide], -1)
        keys = ours.l2norm(keys.unflatten(-1, (4, 16)).contiguous())
        q, k = (each.repeat_interleave(group, 2).contiguous() for each in keys.split(2, 2))
        v = v.unflatten(-1, (4, 24)).contiguous()
        o = packed([q, k, v, -F.softplus(decay), rate.sigmoid()], boundaries)
        normed = F.rms_norm(o, (24,)) * F.silu(gate.unflatten(-1, (4, 24)).contiguous())
        _ = normed.flatten(-2) @ torch.ones(wide, 1, requires_grad=True)
    numbers = sum(each.untyped_storage().nbytes() for each in saved.values()) / 4 / tokens
    assert linear_activations(linear, fused=False) == pytest.approx(numbers, rel=0.05)


def test_tensors_for_further_tokens_are_left_unread_in_this_family_alone(tmp_path: Path) -> None:
    for family in ("qwen3_next", "qwen3_moe"):
        path = save_tiny_model(family, tmp_path / family)
        arch, _ = read_architecture(path)
        file = path / "model.safetensors"
        save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2)}, file)
        if family == "qwen3_next":
            HfDirectory(path).check(arch)
            assert not {name for name in expected_tensors(path) if name.startswith("mtp.")}
        else:
            with pytest.raises(ValueError, match=r"1 are unknown \['mtp\.fc\.weight'\]"):
                HfDirectory(path).check(arch)
            assert "mtp.fc.weight" in expected_tensors(path)


def test_what_has_not_been_tried_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model("qwen3_next", tmp_path / "model", layers=4)
    run = configured(path, "precision=mxfp8")
    arch = read("Qwen3Next")
    (fp8,) = family_problems(arch, run.model, parallel(), run.precision)
    assert "FP8 has not been tried with linear attention; set precision=bf16" in fp8
    words = (
        "parallel.tensor * parallel.context = 4: does not divide the model's 2 key heads of linear"
    )
    layout = parallel(tensor=2, sequence=True, context=2)
    assert any(each.startswith(words) for each in layout_problems(arch, layout, 4))
