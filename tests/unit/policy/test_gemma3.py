"""Gemma 3 without megatron's layers: sizes of published models, the norm, scaled embeddings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from transformers import AutoModelForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from megatron_rl.models import architecture_from, read_architecture
from megatron_rl.models.parameter_map import hf_names
from megatron_rl.models.problems import family_problems
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.policy.model import HiddenStates
from megatron_rl.policy.passes.attention import NormedAdd, RMSNorm
from tests.numerics.policy_cases import parallel
from tests.zoo import configured, save_tiny_model

ATTENTION: dict[str, int] = dict(num_attention_heads=4, num_key_value_heads=1, head_dim=256)


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "total"),
    [(18, 640, 2048, 268_098_176), (26, 1152, 6912, 999_885_952)],
    ids=["270m", "1b"],
)
def test_parameters_of_published_models(layers: int, hidden: int, ffn: int, total: int) -> None:
    """Counted by hand: four query heads and one key-value head of 256, four norms of the width and
    two of a head in each layer; 262,144 rows of an embedding that is the head as well."""
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn)
    config = Gemma3TextConfig(**ATTENTION, **sizes, vocab_size=262_144, sliding_window=512)
    arch = architecture_from(config, "Gemma3ForCausalLM")
    (counts,) = stage_counts(arch, parallel(), 1)
    layer = hidden * 256 * (4 + 1 + 1 + 4) + 3 * hidden * ffn + 4 * hidden + 2 * 256
    assert counts.total == layers * layer + 262_144 * hidden + hidden == total
    assert [n for n in range(layers) if not arch.windowed[n]] == list(range(5, layers, 6))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sorted(hf_names(arch)) == sorted(set(theirs.state_dict()) - {"lm_head.weight"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    """One plus a small weight would lose most of it in bfloat16."""
    torch.manual_seed(0)
    config: Any = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=True
    )
    mine, theirs = RMSNorm(config, 32, eps=1e-6), Gemma3RMSNorm(32).to(dtype)
    theirs.weight.data = mine.weight.data = torch.randn(32, dtype=dtype) / 100
    x = torch.randn(6, 1, 32, dtype=dtype)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-6, atol=0)
    add = NormedAdd(
        RMSNorm, SimpleNamespace(**vars(config), hidden_size=32, layernorm_epsilon=1e-6)
    )
    add.norm.weight.data = mine.weight.data
    torch.testing.assert_close(add(True, False)((x, None), 2 * x, 0.0), 2 * x + mine(x))


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 33.941123962402344), (torch.bfloat16, 34.0)]
)
def test_embeddings_are_scaled_by_a_number_of_their_format(
    dtype: torch.dtype, factor: float
) -> None:
    """The square root of 1152."""
    model = HiddenStates.__new__(HiddenStates)
    given = dict(position_embedding_type="rope", embedding_scale=1152**0.5)
    found = (torch.ones(2, 1, 3, dtype=dtype), None)
    with mock.patch.object(GPTModel, "_preprocess", lambda *_, **__: found):
        for is_first, scale in ((True, factor), (False, 1.0)):
            model.__dict__.update(given, pre_process=is_first)
            states, _ = model._preprocess(packed_seq_params=None)
            assert states.unique().tolist() == [scale]


def test_fp8_is_refused(tmp_path: Path) -> None:
    run = configured(save_tiny_model("gemma3", tmp_path / "model"), "precision=mxfp8")
    arch, _ = read_architecture(tmp_path / "model")
    problems = family_problems(arch, run.model, run.parallel, run.precision)
    assert len(problems) == 1
    assert "FP8 has not been tried with norms behind attention; set precision=bf16" in problems[0]
