"""What a configuration asks of the machine: pure checks, with the facts of the machine as an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import Config, Fp8Config, ParallelConfig

# Sizes of every matrix product must divide by this: the reach of one scale, or what the FP8 kernels need.
BLOCK = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# The first Transformer Engine that megatron-core accepts for a recipe.
MIN_ENGINE = {"delayed": (1, 0), "tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1)}
# Compute capabilities [from, below): FP8 exists since Ada (8.9), scales of blocks since Hopper (9.0), MXFP8 on Blackwell (10.x, 11.x).
CAPABILITY = {"delayed": ((8, 9), (99, 0)), "tensorwise": ((8, 9), (99, 0)), "blockwise": ((9, 0), (99, 0)), "mxfp8": ((10, 0), (12, 0))}
# Widths of an attention head for which vLLM has CPU kernels; it finds out with the first request.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
OTHER_RECIPE = "choose precision=fp8_tensorwise or precision=bf16"


@dataclass(frozen=True)
class Machine:
    """``compute_capability`` of this process's CUDA device, None without one. ``transformer_engine``: its version when it can be
    imported, else None. ``adam``: where megatron-core finds the class of that name.

    Example: ``Machine((9, 0), "2.11.0", "transformer_engine")`` is an H100 or H200 with everything.
    """

    compute_capability: tuple[int, int] | None
    transformer_engine: str | None
    adam: str  # transformer_engine | apex | torch


def machine_problems(config: Config, machine: Machine, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """One message (key, value, remedy) for each thing that ``config`` wants and ``machine`` has not; ``hf_config``: the model's
    config.json, whose sizes are compared with the reach of the scales (None: not looked at)."""
    fp8, precision = config.precision.fp8, config.precision
    if fp8 is not None:
        yield from _recipe(fp8, machine)
        if hf_config is not None:
            yield from _sizes(fp8, config.parallel, hf_config)
    if machine.compute_capability is None and hf_config is not None:
        yield from _cpu_heads(hf_config)
    if precision.adam == "fused" and machine.adam == "torch":
        yield (
            "precision.adam = fused: neither Transformer Engine nor apex can be imported here; install one, or set precision.adam=auto "
            "for torch's AdamW"
        )
    if precision.adam_moments != "float32" and machine.adam != "transformer_engine":
        yield (
            f"precision.adam_moments = {precision.adam_moments}: only the Adam of Transformer Engine keeps such moments, and it cannot be "
            "imported here; install it, or set precision.adam_moments=float32"
        )
    if config.rollout.quantization is not None and (machine.compute_capability or (0, 0)) < (8, 9):
        yield (
            f"rollout.quantization = {config.rollout.quantization}: needs a GPU of compute capability 8.9 or more, this machine has "
            f"{_capability(machine)}; set rollout.quantization=null"
        )


def _cpu_heads(hf_config: Mapping[str, Any]) -> Iterator[str]:
    head_dim, heads = hf_config.get("head_dim"), hf_config.get("num_attention_heads")
    if head_dim is None and isinstance(heads, int) and heads > 0:
        head_dim = hf_config.get("hidden_size", 0) // heads
    if isinstance(head_dim, int) and head_dim not in CPU_HEAD_DIMS:
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        yield (
            f"model.path: head_dim = {head_dim}: without a GPU vLLM has attention for {known} only; "
            "use a model with one of these, or a GPU"
        )


def _capability(machine: Machine) -> str:
    capability = machine.compute_capability
    return "no CUDA device" if capability is None else f"compute capability {capability[0]}.{capability[1]}"


def _recipe(fp8: Fp8Config, machine: Machine) -> Iterator[str]:
    key = f"precision.fp8.recipe = {fp8.recipe}"
    if machine.compute_capability is None:
        yield f"{key}: FP8 needs a GPU, this machine has no CUDA device; choose precision=fp32 or precision=bf16"
        return
    first, end = CAPABILITY[fp8.recipe]
    if not first <= machine.compute_capability < end:
        remedy = OTHER_RECIPE if machine.compute_capability >= (8, 9) else "choose precision=bf16"
        span = f"{first[0]}.{first[1]} or more" + (f" and below {end[0]}.{end[1]}" if end < (99, 0) else "")
        yield f"{key}: needs compute capability {span}, this GPU has {_capability(machine)}; {remedy}"
    if machine.transformer_engine is None:
        yield f"{key}: FP8 layers come from Transformer Engine, which cannot be imported here; install it, or choose precision=bf16"
    elif _version(machine.transformer_engine) < MIN_ENGINE[fp8.recipe]:
        wanted = ".".join(map(str, MIN_ENGINE[fp8.recipe]))
        yield f"{key}: needs Transformer Engine {wanted} or newer, here is {machine.transformer_engine}; update it, or {OTHER_RECIPE}"


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def linear_sizes(parallel: ParallelConfig, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Rows and columns of the matrices of a layer on one rank, by what they are.

    Example: hidden 3584, 28 heads of 128, 4 key-value heads, feed-forward 18944 on tensor=4 give 3584, 1152, 896 and 4736.
    """
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    kv_heads = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    sizes = {
        "hidden_size": hidden,
        "query, key and value rows of one tensor rank": (heads + 2 * kv_heads) * head_dim // parallel.tensor,
        "attention width of one tensor rank": heads * head_dim // parallel.tensor,
    }
    if hf_config.get("moe_intermediate_size"):
        sizes["expert width of one expert-tensor rank"] = hf_config["moe_intermediate_size"] // (parallel.expert_tensor or 1)
    else:
        experts = hf_config.get("num_local_experts")
        ranks = (parallel.expert_tensor or 1) if experts else parallel.tensor
        sizes["feed-forward width of one tensor rank"] = hf_config["intermediate_size"] // ranks
    return sizes


def _sizes(fp8: Fp8Config, parallel: ParallelConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    block = BLOCK[fp8.recipe]
    other = OTHER_RECIPE if block > 16 else "choose precision=bf16"
    for what, size in linear_sizes(parallel, hf_config).items():
        if size % block:
            yield (
                f"precision.fp8.recipe = {fp8.recipe}: the model's {what} is {size}, which does not divide by {block}; lower "
                f"parallel.tensor, or {other}"
            )
