"""Run by an interpreter that has Transformer Engine, on a machine without a GPU.
Arguments: a folder; a second one asks for the check of two processes.
Layers and optimizer are built on the CPU, as if there were a GPU; no forward, backward or step.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformer_engine
import transformer_engine.pytorch as te
import transformers
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.optimizer import Adam
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file
from transformer_engine.pytorch.optimizers import FusedAdam

from megatron_rl.config.rules.hardware import Machine
from megatron_rl.policy import layers, patches
from megatron_rl.policy import model as model_room
from megatron_rl.policy.hardware import transformer_engine_version
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import create_state, parts
from megatron_rl.policy.precision import logprob_format
from megatron_rl.runtime import launch
from tests import zoo

FOLDER = Path(sys.argv[1])
SIZES = dict(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
MODELS = {
    "llama": (
        transformers.LlamaConfig(**SIZES, intermediate_size=512, tie_word_embeddings=False),
        transformers.LlamaForCausalLM,
    ),
    "moe": (
        transformers.Qwen3MoeConfig(
            **SIZES,
            head_dim=64,
            moe_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            intermediate_size=512,
            tie_word_embeddings=False,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        ),
        transformers.Qwen3MoeForCausalLM,
    ),
}
RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
MOMENTS = "precision.adam_moments=bfloat16"


def build(name: str, *overrides: str) -> MegatronPolicy:
    path = FOLDER / name
    if not path.is_dir():
        torch.manual_seed(0)
        config, kind = MODELS[name]
        config.architectures = [kind.__name__]
        kind(config).to(torch.bfloat16).save_pretrained(path)
    return zoo.configured_policy(zoo.configured(path, *overrides))


def states(policy: MegatronPolicy) -> list[tuple[str, torch.Tensor]]:
    """What Adam keeps of each parameter, as plain numbers, and the weights it steps."""
    found = []
    for part in parts(policy.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                found.append(("parameter", parameter.detach().clone()))
                names = sorted(part.optimizer.state[parameter])
                found += [
                    (name, part.optimizer.get_unscaled_state(parameter, name).clone())
                    for name in names
                ]
    return found


def same(before: list[tuple[str, torch.Tensor]], after: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(torch.equal(old, new) for (_, old), (_, new) in zip(before, after, strict=True))


def trained(policy: MegatronPolicy) -> None:
    """Leaves what training leaves: moments that are not zero, float32 weights that are not the
    rounded ones, a count of steps."""
    create_state(policy.optimizer)
    draw = torch.Generator().manual_seed(1)
    for part in parts(policy.optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = 3
            for parameter in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    values = torch.rand(parameter.shape, generator=draw).bfloat16().float()
                    part.optimizer.set_scaled_state(parameter, name, values)
                weights = torch.rand(parameter.shape, generator=draw)
                if "master_param" in part.optimizer.state[parameter]:
                    part.optimizer.set_scaled_state(parameter, "master_param", weights)
                else:
                    parameter.data.copy_(weights)


def layers_and_checkpoint(name: str, model: str, *overrides: str) -> None:
    """Layers are Transformer Engine's; weights come in and go out bit for bit; what is offloaded
    comes back; a checkpoint brings back weights, moments and count."""
    policy = build(model, *overrides)
    kinds = {type(module).__name__ for chunk in policy.modules for module in chunk.modules()}
    assert {
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
    } <= kinds, kinds
    assert (
        model != "moe" or {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"} <= kinds
    ), kinds
    linear = [
        module
        for chunk in policy.modules
        for module in chunk.modules()
        if type(module).__name__ == "TERowParallelLinear"
    ]
    assert all(isinstance(module._fp8_workspaces, dict) for module in linear), (
        "offloading empties these"
    )
    weights = load_file(FOLDER / model / "model.safetensors")
    gathered = dict(policy.gathered_weights())
    assert weights.keys() == gathered.keys() and all(
        torch.equal(weights[key], gathered[key]) for key in weights
    )
    assert all(type(part.optimizer) is FusedAdam for part in parts(policy.optimizer))
    moments = torch.bfloat16 if MOMENTS in overrides else torch.float32
    trained(policy)
    for part in parts(policy.optimizer):
        assert all(
            state["exp_avg"].dtype == state["exp_avg_sq"].dtype == moments
            for state in part.optimizer.state.values()
        )
    written = states(policy)
    policy.offload(("optimizer", "gradients", "weights"))
    policy.reload()
    same(written, states(policy))
    policy.save(FOLDER / f"{name}_checkpoint", {})
    policy.close()
    other = build(model, *overrides)
    other.load(FOLDER / f"{name}_checkpoint")
    same(written, states(other))
    assert {
        group["step"] for part in parts(other.optimizer) for group in part.optimizer.param_groups
    } == {3}
    recipe(other)
    other.close()


def recipe(policy: MegatronPolicy) -> None:
    """megatron turns our settings into the recipe of that name, and asks for it in words that
    Transformer Engine knows."""
    fp8 = policy.precision.fp8
    inside = get_fp8_context(
        policy.config, 0
    )  # a generator whose arguments are bound now; it is not entered
    if fp8 is None:
        assert isinstance(inside, contextlib.nullcontext)
        return
    assert not isinstance(inside, contextlib.nullcontext)
    found: Any = get_fp8_recipe(policy.config)
    kinds = [kind.__name__ for kind in type(found).__mro__]
    assert RECIPES[fp8.recipe] in kinds, kinds
    assert found.fp8_format.name == fp8.format.upper()
    if fp8.recipe == "delayed":
        assert (found.amax_history_len, found.amax_compute_algo) == (
            fp8.amax_history_len,
            fp8.amax_compute_algo,
        )
    bfloat16 = fp8.model_copy(update={"logprobs": "bfloat16"})
    with logprob_format(policy.config, policy.precision.model_copy(update={"fp8": bfloat16})):
        assert isinstance(get_fp8_context(policy.config, 0), contextlib.nullcontext)
    assert not isinstance(get_fp8_context(policy.config, 0), contextlib.nullcontext)


def names() -> None:
    assert HAVE_TE and Adam is FusedAdam
    assert transformer_engine_version() == transformer_engine.__version__
    initialised = inspect.signature(te.fp8_model_init).parameters
    assert {"enabled", "recipe", "preserve_high_precision_init_val"} <= set(initialised)
    assert "_high_precision_init_val" in inspect.getsource(te.module.base), (
        "assign() writes unrounded weights there"
    )


def ends_in_bf16() -> None:
    ends = [f"precision.fp8.num_layers_at_{end}_in_bf16=1" for end in ("start", "end")]
    policy = build("llama", "precision=fp8_tensorwise", *ends)
    inside = [
        not isinstance(get_fp8_context(policy.config, layer), contextlib.nullcontext)
        for layer in range(3)
    ]
    assert inside == [False, True, False], inside
    policy.close()


def param_gather() -> None:
    """Weights in FP8 are quantised by a kernel, so that a layer cannot be built here; megatron asks
    for them in known words."""
    try:
        build("llama", "precision=fp8_tensorwise", "precision.fp8.param_gather=true").close()
    except RuntimeError as error:
        # Of torch, or of the kernel that Transformer Engine 2.20 calls first.
        messages = ("no NVIDIA driver", "CUDA driver version is insufficient")
        assert any(message in str(error) for message in messages), error


def fusions() -> None:
    """megatron's fused kernels are on, and the one for the rotary angles of packed sequences takes
    what megatron gives it."""
    policy = build("llama", "precision=bf16")
    assert policy.config.apply_rope_fusion
    assert policy.config.bias_activation_fusion
    # Layers of Transformer Engine add to main_grad, and the head is built without apex.
    assert policy.config.gradient_accumulation_fusion
    layer = policy.chunks[0].module.module.decoder.layers[0]
    assert layer.mlp.linear_fc2.fuse_wgrad_accumulation
    fused = rope_utils.fused_apply_rotary_pos_emb_thd
    assert fused is not None
    wanted = {"cu_seqlens", "freqs", "cp_size", "cp_rank", "interleaved"}
    assert wanted <= set(inspect.signature(fused).parameters)
    policy.close()


def selective() -> None:
    """Recomputation saves something: the feed-forward part; of experts the activation and the
    norm."""
    dense = build("llama", "precision=bf16", "parallel.recompute=selective")
    layers = [each for each in dense.modules[0].modules() if type(each) is TransformerLayer]
    assert len(layers) == SIZES["num_hidden_layers"]
    assert all(layer.recompute_mlp for layer in layers)
    dense.close()
    experts = build("moe", "precision=bf16", "parallel.recompute=selective")
    layers = [each for each in experts.modules[0].modules() if type(each) is TransformerLayer]
    assert all(layer.recompute_pre_mlp_layernorm for layer in layers)
    assert all(layer.mlp.experts.activation_recompute for layer in layers)
    experts.close()


def both_layouts() -> None:
    """A checkpoint of experts that are modules of their own is read into grouped ones."""
    fused = model_room.fused_kernels

    def single(arch: Any) -> dict[str, Any]:
        return fused(arch) | {"moe_grouped_gemm": False}

    with mock.patch.object(model_room, "fused_kernels", single):
        policy = build("moe", "precision=bf16")
    assert any("local_experts" in item.name for item in policy.held)
    trained(policy)
    for number, item in enumerate(policy.held):
        item.tensor.data.fill_(number)
    written = dict(policy.gathered_weights())
    policy.save(FOLDER / "single_checkpoint", {})
    policy.close()
    grouped = build("moe", "precision=bf16")
    assert any("linear_fc1.weight3" in item.name for item in grouped.held)
    grouped.load(FOLDER / "single_checkpoint")
    found = dict(grouped.gathered_weights())
    assert written.keys() == found.keys()
    assert all(torch.equal(written[key], found[key]) for key in written)
    grouped.close()


def sequence() -> None:
    """Collective, two processes: with the answer True everywhere a sequence-parallel policy is
    built, its layers know it, weights come in and go out bit for bit, and the scopes of random
    state that its forward enters can be entered."""
    policy = build("llama", "precision=bf16", "parallel.tensor=2", "parallel.sequence=true")
    modules = [module for chunk in policy.modules for module in chunk.modules()]
    linear = [each for each in modules if isinstance(each, te.LayerNormLinear | te.Linear)]
    assert len(linear) == 4 * SIZES["num_hidden_layers"]
    assert all(each.sequence_parallel and each.tp_size == 2 for each in linear)
    norms = [each.layer_norm_weight for each in linear if isinstance(each, te.LayerNormLinear)]
    assert all(weight.sequence_parallel for weight in norms), (
        "their gradients are summed over ranks"
    )
    weights = load_file(FOLDER / "llama" / "model.safetensors")
    gathered = dict(policy.gathered_weights())
    assert weights.keys() == gathered.keys()
    assert all(torch.equal(weights[key], gathered[key]) for key in weights)
    with megatron_random.get_cuda_rng_tracker().fork():
        pass
    policy.close()


def answer(*callers: str) -> None:
    """``torch.cuda.is_available()`` is true for modules whose names begin so."""
    ask = torch.cuda.is_available

    def asked() -> bool:
        return sys._getframe(1).f_globals["__name__"].startswith(callers) or ask()

    torch.cuda.is_available = asked


def main() -> None:
    together = len(sys.argv) > 2
    answer("transformer_engine", *(["megatron_rl.policy.patches"] if together else []))
    hopper = Machine((9, 0), transformer_engine.__version__, "transformer_engine")
    model_room.this_machine = layers.this_machine = patches.this_machine = lambda: hopper
    launch.start()
    if together:
        sequence()
        print("OK sequence", flush=True)
        launch.exit_process(0)
    plain = (names, ends_in_bf16, fusions, selective, both_layouts)
    checks = {
        **{check.__name__: check for check in plain},
        "bf16": lambda: layers_and_checkpoint("bf16", "llama", "precision=bf16"),
        "bf16_moments": lambda: layers_and_checkpoint(
            "bf16_moments", "llama", "precision=bf16", MOMENTS
        ),
        "fp8_tensorwise_moments": lambda: layers_and_checkpoint(
            "fp8_moments", "llama", "precision=fp8_tensorwise", MOMENTS
        ),
        "moe": lambda: layers_and_checkpoint("moe", "moe", "precision=bf16"),
        "moe_recomputed": lambda: layers_and_checkpoint(
            "moe_fp8", "moe", "precision=fp8_tensorwise", "parallel.recompute=selective"
        ),
    }
    for precision in ("fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"):
        checks[precision] = lambda precision=precision: layers_and_checkpoint(
            precision, "llama", f"precision={precision}"
        )
    checks["param_gather"] = param_gather  # last: it breaks off
    for name, check in checks.items():
        check()
        print(f"OK {name}", flush=True)
    print("OK everything", flush=True)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
