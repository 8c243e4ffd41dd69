"""Phi-4 and OLMo: sizes of published models, what is refused, and the norm over all heads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo3Config, Phi3Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from megatron_rl.models import architecture_from, read_architecture
from megatron_rl.models.parameter_map import hf_names
from megatron_rl.models.problems import adapter_problems, family_problems
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.policy.passes.self_attention import HeadsNorm
from tests.numerics.policy_cases import parallel
from tests.ranks import on_ranks
from tests.zoo import configured, save_tiny_model


def sizes(layers: int, hidden: int, ffn: int, heads: int, key_heads: int, vocab: int) -> Any:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocab,
        pad_token_id=0,
    )


@pytest.mark.parametrize(
    ("config", "name", "total"),
    [
        (Phi3Config(**sizes(40, 5120, 17920, 40, 10, 100352)), "Phi3ForCausalLM", 14_659_507_200),
        (Olmo2Config(**sizes(32, 4096, 11008, 32, 32, 100352)), "Olmo2ForCausalLM", 7_298_617_344),
        (Olmo3Config(**sizes(64, 5120, 27648, 40, 8, 100278)), "Olmo3ForCausalLM", 32_233_522_176),
    ],
    ids=["phi-4", "olmo-2-7b", "olmo-3-32b"],
)
def test_parameters_of_published_models(config: Any, name: str, total: int) -> None:
    """Counted by hand: heads of 128; the norms of OLMo are two of the width, one over the queries
    and one over the keys, those of Phi-4 two of the width."""
    arch = architecture_from(config, name)
    (counts,) = stage_counts(arch, parallel(), 1)
    hidden, queries, keys = config.hidden_size, 128 * arch.num_heads, 128 * arch.num_kv_heads
    layer = 2 * hidden * (queries + keys) + 3 * hidden * config.intermediate_size + 2 * hidden
    layer += queries + keys if "Olmo" in name else 0
    assert counts.total == arch.num_layers * layer + (2 * config.vocab_size + 1) * hidden == total
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sorted(hf_names(arch)) == sorted(theirs.state_dict())


def test_olmo_3_has_windows_and_one_base() -> None:
    arch = architecture_from(Olmo3Config(**sizes(8, 64, 96, 4, 2, 128)), "Olmo3ForCausalLM")
    assert [n for n in range(8) if not arch.windowed[n]] == [3, 7]
    assert (arch.rope_theta, arch.local_rope_theta) == (5e5, 5e5)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers_over_the_heads_of_all_ranks(dtype: torch.dtype) -> None:
    """Forward and backward: each rank has two of four heads."""
    torch.manual_seed(0)
    rank, group = dist.get_rank(), dist.group.WORLD
    config = SimpleNamespace(layernorm_epsilon=1e-6, kv_channels=8, params_dtype=dtype)
    mine, theirs = HeadsNorm(config, 4, group), Olmo2RMSNorm(32, 1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_()
        mine.weight.copy_(theirs.weight[16 * rank :][:16])
    whole = torch.randn(6, 1, 4, 8, dtype=dtype, requires_grad=True)
    factors = torch.randn(6, 1, 4, 8, dtype=dtype)
    own = whole.detach()[:, :, 2 * rank :][:, :, :2].requires_grad_()
    wanted = theirs(whole.flatten(-2)).view_as(whole)
    found = mine(own)
    (wanted * factors).sum().backward()
    (found * factors[:, :, 2 * rank :][:, :, :2]).sum().backward()
    close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    part = slice(2 * rank, 2 * rank + 2)
    assert whole.grad is not None and theirs.weight.grad is not None
    torch.testing.assert_close(found, wanted[:, :, part], **close)
    torch.testing.assert_close(own.grad, whole.grad[:, :, part], **close)
    of_rank = theirs.weight.grad[16 * rank :][:16]
    torch.testing.assert_close(mine.weight.grad, of_rank, **close)


def problems(path: Path, *overrides: str) -> list[str]:
    run = configured(path, *overrides)
    arch, _ = read_architecture(path)
    sections = (run.model, run.parallel, run.precision)
    return [*family_problems(arch, *sections), *adapter_problems(arch, *sections)]


def test_what_is_refused(tmp_path: Path) -> None:
    olmo = save_tiny_model("olmo2", tmp_path / "olmo2")
    phi = save_tiny_model("phi3", tmp_path / "phi3")
    assert problems(phi, "model.lora.rank=4") == problems(olmo, "model.lora.rank=4") == []
    (found,) = problems(olmo, "parallel.tensor=4")
    assert "parallel.tensor = 4: ranks that share a key-value head" in found
    assert "set it to at most 2" in found
