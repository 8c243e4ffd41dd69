"""What is switched on with layers of Transformer Engine, checked by megatron's own validation;
names of experts in both layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils

from megatron_rl.config.rules.hardware import Machine
from megatron_rl.models import read_architecture
from megatron_rl.policy import layers, model
from megatron_rl.policy.activations import selective_modules
from megatron_rl.policy.passes.latent_attention import LatentSelfAttention
from megatron_rl.policy.passes.self_attention import NormedTwoBasesAttention
from megatron_rl.policy.state import weights
from tests import zoo
from tests.numerics.policy_cases import parallel
from tests.unit.small_models import DENSE, EXPERTS, experts, precision

ROTARY = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
PERMUTE = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
KERNELS = ("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion", "moe_grouped_gemm")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Transformer Engine; megatron finds its kernels, and a version that is new
    enough."""
    for module in (model, layers):
        monkeypatch.setattr(
            module, "this_machine", lambda: Machine((9, 0), "2.20.2", "transformer_engine")
        )
    monkeypatch.setattr(
        "megatron.core.transformer.transformer_config.is_te_min_version", lambda *_, **__: True
    )
    for module, names in ((rope_utils, ROTARY), (moe_utils, PERMUTE)):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: None, raising=False)


def kernels(arch: Any, **layout: Any) -> list[str]:
    config = model.transformer_config(arch, parallel(**layout), precision())
    return [name for name in KERNELS if getattr(config, name)]


def test_no_kernel_is_fused_without_transformer_engine() -> None:
    assert kernels(DENSE) == kernels(EXPERTS) == []


def test_kernels_are_fused_with_transformer_engine(engine: None) -> None:
    assert kernels(DENSE, context=2) == ["apply_rope_fusion", "bias_activation_fusion"]
    assert kernels(EXPERTS, expert=2) == list(KERNELS)


def adds_to_main_grad() -> bool:
    return model.transformer_config(DENSE, parallel(), precision()).gradient_accumulation_fusion


def test_products_add_to_main_grad_with_transformer_engine(engine: None) -> None:
    assert adds_to_main_grad()


def test_products_add_to_main_grad_with_apex_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not adds_to_main_grad()
    monkeypatch.setattr(model.layers, "_grad_accum_fusion_available", True)
    assert not adds_to_main_grad()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert adds_to_main_grad()


def test_layers_of_transformer_engine_are_asked_for_grouped_experts(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        layers, "get_gpt_layer_with_transformer_engine_spec", lambda **given: asked.append(given)
    )
    for arch in (DENSE, EXPERTS):
        config = model.transformer_config(arch, parallel(), precision())
        _, norm = layers.layer_spec(config, arch.num_experts or None)
        assert norm is extension.TENorm
    assert [given["moe_grouped_gemm"] for given in asked] == [False, True]


def test_layers_with_adapters_have_their_norms_apart(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused layer takes inputs before the norm, which are not those of an adapter."""
    layer = layers.get_gpt_layer_local_spec()
    monkeypatch.setattr(layers, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
    config = model.transformer_config(DENSE, parallel(), precision())
    parts = layers.layer_spec(config, None, bare=True)[0].submodules
    assert parts.input_layernorm is parts.pre_mlp_layernorm is extension.TENorm
    linear = extension.TEColumnParallelLinear
    assert parts.self_attention.submodules.linear_qkv is linear
    assert parts.mlp.keywords["submodules"].linear_fc1 is linear


def test_latent_attention_with_adapters_has_its_norms_apart(
    engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = layers.get_gpt_layer_local_spec(num_experts=4, multi_latent_attention=True)
    monkeypatch.setattr(layers, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
    arch, _ = read_architecture(zoo.save_tiny_model("deepseek_v3", tmp_path / "model"))
    config = model.transformer_config(arch, parallel(), precision())
    attention = layers.layer_spec(config, 4, bare=True)[0].submodules.self_attention
    parts = attention.submodules
    assert parts.q_layernorm is parts.kv_layernorm is extension.TENorm
    linear = extension.TEColumnParallelLinear
    assert parts.linear_q_up_proj is parts.linear_kv_up_proj is linear
    assert attention.module is LatentSelfAttention


def test_layers_without_a_norm_before_their_parts(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OLMo 3: norms behind them, and attention with norms and angles of its own."""
    layer = layers.get_gpt_layer_local_spec()
    monkeypatch.setattr(layers, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
    monkeypatch.setattr(layers, "get_transformer_layer_offset", lambda *_: 0)
    monkeypatch.setattr(layers, "get_num_layers_to_build", lambda *_, **__: 1)
    more: Any = dict(input_norms=False, output_norms=True, heads_norm=True, local_rope_theta=1e4)
    arch = replace(DENSE, **more)
    config = model.transformer_config(arch, parallel(), precision())
    parts = layers.block_spec(config, arch, None).layer_specs[0].submodules
    assert parts.input_layernorm is parts.pre_mlp_layernorm is IdentityOp
    assert parts.mlp_bda.params["norm"] is extension.TENorm
    assert parts.self_attention.module is NormedTwoBasesAttention
    assert parts.self_attention.params["window_scale"] == DENSE.head_dim**-0.5
    linear = extension.TEColumnParallelLinear
    assert parts.self_attention.submodules.linear_qkv is linear
    assert parts.mlp.keywords["submodules"].linear_fc1 is linear


def test_only_a_pipeline_without_cuda_asks_for_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(pipeline: int) -> bool:
        return model.transformer_config(
            DENSE, parallel(pipeline=pipeline), precision()
        ).variable_seq_lengths

    assert [asks(1), asks(2)] == [False, True]
    monkeypatch.setattr(model, "one_length", lambda: True)
    assert [asks(1), asks(2)] == [False, False]


def test_what_gloo_cannot_do_with_cut_experts_is_refused() -> None:
    layout = parallel(tensor=2, sequence=True, expert_tensor=2, pipeline=2)
    with pytest.raises(ValueError, match="without a GPU not together with parallel"):
        model.transformer_config(EXPERTS, layout, precision())


def test_what_is_run_again(engine: None) -> None:
    def fields(arch: Any, recompute: str, *overrides: str) -> tuple[Any, ...]:
        built = model.transformer_config(arch, parallel(recompute=recompute), precision(*overrides))
        return built.recompute_granularity, built.recompute_modules

    assert fields(DENSE, "none")[0] is None
    assert fields(DENSE, "full")[0] == "full"
    assert fields(DENSE, "selective") == ("selective", ["mlp"])
    assert fields(DENSE, "selective", "precision=fp8_delayed") == ("selective", ["mlp"])
    assert fields(EXPERTS, "selective") == ("selective", ["moe_act", "layernorm"])
    assert fields(EXPERTS, "selective", "precision=fp8_tensorwise") == (
        "selective",
        ["moe_act", "layernorm"],
    )
    assert fields(EXPERTS, "selective", "precision=fp8_delayed") == ("selective", ["moe"])


def test_without_transformer_engine_the_whole_feed_forward_part_is_run_again() -> None:
    config = model.transformer_config(EXPERTS, parallel(recompute="selective"), precision())
    assert config.recompute_modules == ["moe"]
    assert selective_modules(False, fused=False) == ["mlp"]


RANKS = SimpleNamespace(expert=4, expert_rank=3)


@pytest.mark.parametrize(
    ("rest", "slot", "expert"),
    [
        ("mlp.experts.local_experts.1.linear_fc1.weight", "linear_fc1.weight", 7),
        ("mlp.experts.linear_fc1.weight1", "linear_fc1.weight", 7),
        ("mlp.experts.local_experts.0.linear_fc2.weight", "linear_fc2.weight", 6),
        ("mlp.experts.linear_fc2.weight0", "linear_fc2.weight", 6),
        ("mlp.router.weight", "mlp.router.weight", None),
    ],
)
def test_both_layouts_of_experts_have_the_names_of_the_checkpoint(
    rest: str, slot: str, expert: int | None
) -> None:
    # The second of two layers of this stage is layer 5 of a model; 8 experts, 2 on each of 4 ranks.
    found = weights._identify(f"decoder.layers.1.{rest}", [4, 5], EXPERTS, RANKS)
    assert (found.slot.megatron, found.layer, found.expert) == (slot, 5, expert)
    if expert is not None:
        assert all(name.startswith(f"model.layers.5.mlp.experts.{expert}.") for name in found.names)


def test_numbered_weights_keep_their_order_from_ten_on() -> None:
    found = weights._identify(
        "decoder.layers.0.mlp.experts.linear_fc1.weight11", [0], experts(48), RANKS
    )
    assert found.expert == 3 * 12 + 11


def test_an_unknown_weight_of_experts_is_refused() -> None:
    with pytest.raises(AssertionError, match="no HF tensor is known"):
        weights._identify("decoder.layers.0.mlp.experts.linear_fc1.bias0", [0], EXPERTS, RANKS)
