"""GPT-OSS without an engine: sizes as published, its activation and its sinks by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.models.problems import family_problems
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.policy.activations import feed_forward_activations
from megatron_rl.policy.passes.biased_experts import ClampedGlu, with_sinks
from tests.numerics.policy_cases import parallel
from tests.zoo import configured, save_tiny_model
from tools.plan_sync import architecture


@pytest.mark.parametrize(
    ("model", "layers", "experts", "total"),
    [("gpt-oss-20b", 24, 32, 20_914_757_184), ("gpt-oss-120b", 36, 128, 116_829_156_672)],
)
def test_parameters_of_the_published_models(
    model: str, layers: int, experts: int, total: int
) -> None:
    """Counted by hand. Hidden and expert width 2880, 64 query and 8 key-value heads of 64."""
    hidden, heads = 2880, 64 * 64
    attention = 2 * hidden * heads + 2 * hidden * 512 + heads + 2 * 512 + hidden + 64
    expert = 3 * hidden * 2880 + 2 * 2880 + hidden
    layer = attention + 2 * hidden + experts * (expert + hidden + 1)
    (counts,) = stage_counts(architecture(model), parallel(), 1)
    assert counts.total == layers * layer + 2 * 201088 * hidden + hidden == total


def test_windows_are_in_every_other_layer() -> None:
    arch = architecture("gpt-oss-20b")
    assert (arch.window, arch.windowed) == (128, (True, False) * 12)
    assert arch.attention_factor == pytest.approx(0.1 * math.log(32) + 1)


def test_the_clamped_unit_by_hand() -> None:
    """Gate and up alternate; both are cut at 7, the gate above only."""
    rows = torch.tensor([[0.5, 9.0, -9.0, 1.0], [8.0, -8.0, 0.0, 3.0]])
    low = -9 / (1 + math.exp(1.702 * 9)) * 2
    high = 7 / (1 + math.exp(-1.702 * 7)) * -6
    wanted = torch.tensor([[0.5 / (1 + math.exp(-0.851)) * 8, low], [high, 0.0]])
    torch.testing.assert_close(ClampedGlu(None)(rows), wanted)


def by_formula(
    sinks: Tensor, scale: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """``exp(s_ij) v_j`` over ``sum_j exp(s_ij) + exp(sink)``."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    weights = torch.einsum("bthd,bshd->bhts", q, k).mul(scale).exp() * mask
    weights = weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_are_one_more_term_of_the_softmax(masked: bool) -> None:
    """Results and all gradients; with a mask the queries are the last tokens, with a window."""
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    tokens = 3 if masked else 5
    inputs = (tensor(4), tensor(2, tokens, 4, 8), tensor(2, 5, 2, 8), tensor(2, 5, 2, 8))
    sinks, *rest = inputs
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    if masked:
        mask = (mask & ~torch.ones(5, 5, dtype=torch.bool).tril(-3))[-tokens:]
    q, k, v, seen = with_sinks(sinks, 0.3, *rest, mask if masked else None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    settings = dict(scale=0.3, enable_gqa=True, is_causal=seen is None)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, **settings)
    out = out.transpose(1, 2)[:, -tokens:, :, :8]
    wanted = by_formula(sinks, 0.3, *rest, mask)
    torch.testing.assert_close(out, wanted)
    weights = tensor(*out.shape).detach()
    got = torch.autograd.grad((out * weights).sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad((wanted * weights).sum(), inputs))


def test_a_sink_is_exact_in_bfloat16() -> None:
    """The scale of YaRN is no power of two: rounded once it would move a sink of 8 by 0.02."""
    scale = 1.3465735902799727**2 / 8
    sinks, zero = torch.tensor([8.0]).bfloat16(), torch.zeros(1, 1, 1, 8).bfloat16()
    query, key, _, _ = with_sinks(sinks, scale, zero, zero, zero, None)
    assert float(query[0, 1, 0].double() @ key[0, 0, 0].double()) * scale == pytest.approx(
        8, abs=1e-3
    )


def test_numbers_that_an_expert_keeps_for_its_backward() -> None:
    """Those of the plan: eight widths of a token, and its states before and after."""
    width, tokens, saved = 300, 64, {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    up, down = torch.ones(4, 2 * width).requires_grad_(), torch.ones(width, 4).requires_grad_()
    states, share = torch.ones(tokens, 4), torch.ones(tokens, 1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = (ClampedGlu(None)(states @ up + up[0]) * share) @ down
    others = {tensor.data_ptr() for tensor in (up, down, states, share)}
    sizes = [each.untyped_storage().nbytes() for key, each in saved.items() if key not in others]
    assert sum(sizes) == 8 * 4 * tokens * width
    arch = replace(architecture("gpt-oss-20b"), expert_ffn_hidden_size=width, hidden_size=4)
    assert feed_forward_activations(arch, parallel(), False) == 4 * (8 * width + 2 * 4)


def test_what_megatron_and_fp8_lack_is_refused(tmp_path) -> None:
    run = configured(save_tiny_model("gpt_oss", tmp_path / "model", layers=2), "precision=mxfp8")
    layout = parallel(expert_tensor=2, tensor=2, sequence=True)
    problems = family_problems(architecture("gpt-oss-20b"), run.model, layout, run.precision)
    assert len(problems) == 2
    assert "FP8 has not been tried with GPT-OSS; set precision=bf16" in problems[0]
    assert "parallel.expert_tensor = 2: megatron-core does not cut experts" in problems[1]
