"""Number formats in megatron-core's own terms, checked by its own validation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.fp8_utils import get_fp8_align_size, is_first_last_bf16_layer
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.hardware import Machine
from megatron_rl.config.schema import Config
from megatron_rl.policy.batches.microbatches import Multiples, multiples
from megatron_rl.policy.hardware import this_machine, transformer_engine_version
from megatron_rl.policy.precision import (
    assign,
    ddp_config,
    describe,
    logprob_format,
    model_fields,
    optimizer_config,
    plain,
    token_multiple,
)

RECIPES = {
    "fp8_delayed": "delayed",
    "fp8_tensorwise": "tensorwise",
    "fp8_blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


def config(*overrides: str) -> Config:
    return validate(
        Config,
        compose("config", ["model.path=m", "data.train=t", "data.eval=e", *overrides]),
        "test",
    )


def model(*overrides: str, experts: int = 0, **more) -> TransformerConfig:
    fields = model_fields(config(*overrides).precision, experts)
    return TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fields, **more)


def test_without_fp8_only_the_dtypes_are_set():
    assert model_fields(config("precision=fp32").precision, 0) == {
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
    }
    assert (
        model("precision=bf16").params_dtype == torch.bfloat16
        and model("precision=bf16").fp8 is None
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_one_of_megatron_core(name):
    built = model(f"precision={name}")
    assert (
        built.fp8_recipe == RECIPES[name]
        and built.bf16
        and not built.fp8_param
        and not built.first_last_layers_bf16
    )
    assert built.fp8 == ("hybrid" if name in ("fp8_delayed", "fp8_tensorwise") else "e4m3")
    assert (built.fp8_amax_history_len, built.fp8_amax_compute_algo) == (
        (1024, "max") if name == "fp8_delayed" else (1, "most_recent")
    )


def test_the_layers_at_the_ends_that_stay_in_bf16():
    built = model(
        "precision=fp8_tensorwise",
        "precision.fp8.num_layers_at_start_in_bf16=1",
        "precision.fp8.num_layers_at_end_in_bf16=2",
    )
    assert [is_first_last_bf16_layer(built, layer) for layer in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    only_first = model("precision=fp8_tensorwise", "precision.fp8.num_layers_at_start_in_bf16=1")
    assert [is_first_last_bf16_layer(only_first, layer) for layer in range(4)] == [
        True,
        False,
        False,
        False,
    ]


def test_megatron_core_refuses_what_the_start_up_checks_refuse():
    with pytest.raises(
        ValueError, match="Delayed scaling does not support first / last layer in BF16"
    ):
        model("precision=fp8_delayed", "precision.fp8.num_layers_at_start_in_bf16=1")
    with pytest.raises(ValueError, match="num_layers_at_end_in_bf16"):
        model("precision=fp8_tensorwise", "precision.fp8.num_layers_at_end_in_bf16=5")


def test_experts_are_filled_up_to_whole_blocks():
    assert model_fields(config("precision=mxfp8").precision, 8)[
        "moe_router_padding_for_quantization"
    ]
    assert not model("precision=mxfp8").moe_router_padding_for_quantization
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(model_fields(config("precision=fp8_delayed").precision, 8)) <= names


def test_parameters_gathered_in_fp8():
    run = config(
        "precision=fp8_blockwise",
        "precision.fp8.param_gather=true",
        "parallel.distributed_optimizer=true",
    )
    assert model("precision=fp8_blockwise", "precision.fp8.param_gather=true").fp8_param
    assert ddp_config(run.parallel, run.precision).fp8_param_gather
    assert not ddp_config(
        run.parallel, config("precision=fp8_blockwise").precision
    ).fp8_param_gather


@pytest.mark.parametrize("name", ["fp32", "bf16", *RECIPES])
def test_the_optimizer_knows_the_recipe(name):
    run = config(f"precision={name}")
    built = optimizer_config(run.optim, run.parallel, run.precision)
    assert isinstance(built, OptimizerConfig)
    assert (
        built.fp8_recipe == RECIPES.get(name)
        and built.bf16 == (name != "fp32")
        and not built.use_precision_aware_optimizer
    )
    assert (built.lr, built.adam_beta2, built.adam_eps) == (
        run.optim.learning_rate,
        run.optim.beta2,
        run.optim.eps,
    )


@pytest.mark.skipif(not USING_PYTORCH_OPTIMIZER, reason="a fused Adam is installed")
def test_megatron_core_cannot_build_small_moments_without_transformer_engine():
    """The start-up checks say so before."""
    run = config("precision.adam_moments=bfloat16", "parallel.distributed_optimizer=true")
    with pytest.raises(RuntimeError, match="requires FusedAdam from TransformerEngine"):
        optimizer_config(run.optim, run.parallel, run.precision)


@pytest.mark.parametrize(
    ("reduced", "wanted"), [("true", torch.float32), ("false", torch.bfloat16)]
)
def test_small_moments_and_the_format_of_the_gradients(reduced, wanted, monkeypatch):
    monkeypatch.setattr(
        OptimizerConfig, "__post_init__", lambda self: None
    )  # it asks for Transformer Engine
    run = config(
        "precision.adam_moments=bfloat16",
        "parallel.distributed_optimizer=true",
        f"precision.grad_reduce_in_float32={reduced}",
    )
    built = optimizer_config(run.optim, run.parallel, run.precision)
    assert (
        built.use_precision_aware_optimizer
        and built.exp_avg_dtype == built.exp_avg_sq_dtype == torch.bfloat16
    )
    assert not built.store_param_remainders, "megatron cannot reload those in another layout"
    assert built.main_grads_dtype == wanted and built.main_params_dtype == torch.float32


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_of_a_rank_fill_whole_blocks(name):
    multiple = token_multiple(config(f"precision={name}").precision)
    assert multiple % get_fp8_align_size(RECIPES[name]) == 0
    assert multiple == (128 if name == "fp8_blockwise" else get_fp8_align_size(RECIPES[name]))
    assert multiples(1, 1, False, multiple) == Multiples(1, multiple)
    assert multiples(1, 4, False, multiple) == Multiples(
        1, multiple
    )  # without sequence parallelism a tensor rank has all tokens
    assert multiples(1, 4, True, multiple) == Multiples(1, 4 * multiple)
    assert multiples(2, 4, True, multiple) == Multiples(4, 8 * multiple)
    assert multiples(3, 1, False, multiple).total % (3 * multiple) == 0
    assert token_multiple(config("precision=bf16").precision) == 1


def test_logprob_passes_without_fp8_and_back_even_after_an_error():
    built = model("precision=fp8_tensorwise")
    other = config("precision=fp8_tensorwise", "precision.fp8.logprobs=bfloat16").precision
    with logprob_format(built, config("precision=fp8_tensorwise").precision):
        assert built.fp8 == "hybrid"
    with pytest.raises(ZeroDivisionError), logprob_format(built, other):
        assert built.fp8 is None
        raise ZeroDivisionError
    assert built.fp8 == "hybrid"


def test_ordinary_parameters_are_themselves():
    parameter = torch.nn.Parameter(torch.zeros(3))
    assign(parameter, torch.tensor([1.0, 2.0, 3.0]))
    assert parameter.tolist() == [1, 2, 3] and plain(parameter) is parameter


def test_what_was_chosen_in_one_line():
    run = config(
        "precision=fp8_blockwise",
        "precision.fp8.num_layers_at_start_in_bf16=2",
        "precision.fp8.logprobs=bfloat16",
    ).precision
    assert (
        describe(run, Machine((9, 0), "2.20.2", "transformer_engine"))
        == "layers of Transformer Engine 2.20.2, weights bfloat16, FP8 blockwise (e4m3), 2 layers"
        " in bfloat16, logprobs without FP8, Adam of Transformer Engine"
    )
    assert (
        describe(config("precision=fp32").precision, Machine(None, None, "torch"))
        == "layers of megatron-core and torch, weights float32, Adam of torch"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_the_facts_of_a_machine_without_cuda():
    assert this_machine().compute_capability is None and this_machine().transformer_engine is None
    assert (this_machine().adam == "torch") == USING_PYTORCH_OPTIMIZER


def test_a_library_that_is_installed_and_broken_is_reported(tmp_path, monkeypatch, caplog):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no library for this build')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "transformer_engine", raising=False)
    assert transformer_engine_version() is None
    assert "no library for this build" in caplog.text
