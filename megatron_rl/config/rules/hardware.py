"""Requirements of a configuration on the machine, whose facts are an argument: pure checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.model_config import ModelSizes, model_sizes
from megatron_rl.config.schema import Config, Fp8Config, ParallelConfig, RolloutConfig

# Sizes of every matrix product must be multiples of this: the block of one scale, or what the FP8
# kernels need.
BLOCK = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# The first Transformer Engine that megatron-core accepts for a recipe.
_MIN_ENGINE = {"delayed": (1, 0), "tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1)}
# Compute capabilities [from, below): FP8 exists since Ada (8.9), scales of blocks since Hopper
# (9.0), MXFP8 on Blackwell (10.x, 11.x).
_CAPABILITY = {
    "delayed": ((8, 9), (99, 0)),
    "tensorwise": ((8, 9), (99, 0)),
    "blockwise": ((9, 0), (99, 0)),
    "mxfp8": ((10, 0), (12, 0)),
}
# Widths of an attention head for which vLLM has CPU kernels; it fails only at the first request.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_LATENT_DIM = 576
_CPU_LINEAR_DIMS = ((64, 64), (128, 128))  # key and value
_OTHER_RECIPE = "choose precision=fp8_tensorwise or precision=bf16"


@dataclass(frozen=True)
class Machine:
    """Facts about the machine of this process.

    Example: ``Machine((9, 0), "2.20.2", "transformer_engine")`` is an H100 or H200 with everything.
    """

    compute_capability: tuple[int, int] | None  # of this process's CUDA device, None without one
    transformer_engine: str | None  # its version when it can be imported, else None
    adam: str  # where megatron-core finds it: transformer_engine | apex | torch


def machine_problems(
    config: Config, machine: Machine, hf_config: Mapping[str, Any] | None
) -> Iterator[str]:
    """One message (key, value, remedy) for each thing that ``config`` needs and ``machine`` lacks.

    ``hf_config``: the model's config.json, whose sizes must suit the kernels (None: not checked).
    """
    precision = config.precision
    fp8 = precision.fp8
    sizes = None if hf_config is None else model_sizes(hf_config)
    if fp8 is not None:
        yield from _recipe(fp8, machine)
        if sizes is not None:
            yield from _block_sizes(fp8, config.parallel, sizes)
    yield from engine_problems(config.rollout, machine, sizes)
    profile = config.profile
    if profile.steps and profile.kind != "torch" and machine.compute_capability is None:
        yield (
            f"profile.kind = {profile.kind}: records what a GPU does, and there is no CUDA device;"
            " set profile.kind=torch"
        )
    if precision.adam == "fused" and machine.adam == "torch":
        yield (
            "precision.adam = fused: neither Transformer Engine nor apex can be imported here;"
            " install one, or set precision.adam=auto for torch's AdamW"
        )
    if precision.adam_moments != "float32" and machine.adam != "transformer_engine":
        yield (
            f"precision.adam_moments = {precision.adam_moments}: only the Adam of Transformer"
            " Engine keeps such moments, and it cannot be imported here; install it, or set"
            " precision.adam_moments=float32"
        )


def engine_problems(
    rollout: RolloutConfig, machine: Machine, sizes: ModelSizes | None
) -> Iterator[str]:
    """Requirements of the engine alone that ``machine`` does not meet."""
    on_cpu = machine.compute_capability is None
    if on_cpu and sizes and sizes.latent_dim not in (0, _CPU_LATENT_DIM):
        yield (
            f"model.path: kv_lora_rank + qk_rope_head_dim = {sizes.latent_dim}: without a GPU vLLM"
            f" has latent attention for {_CPU_LATENT_DIM} only; use a model with that, or a GPU"
        )
    elif on_cpu and sizes and sizes.head_dim and sizes.head_dim not in _CPU_HEAD_DIMS:
        known = ", ".join(map(str, _CPU_HEAD_DIMS))
        yield (
            f"model.path: head_dim = {sizes.head_dim}: without a GPU vLLM has attention for {known}"
            " only; use a model with one of these, or a GPU"
        )
    if on_cpu and sizes and sizes.linear_layers:
        if rollout.dtype != "bfloat16":
            yield (
                f"rollout.dtype = {rollout.dtype}: without a GPU vLLM has linear attention in"
                " bfloat16 only; set rollout.dtype=bfloat16"
            )
        if rollout.enable_prefix_caching:
            yield (
                "rollout.enable_prefix_caching = True: vLLM keeps states of linear attention where"
                " prompts may be cut, which they are not without a GPU; set it to false"
            )
        if sizes.linear_dims not in _CPU_LINEAR_DIMS:
            key, value = sizes.linear_dims
            yield (
                f"model.path: linear_key_head_dim = {key}, linear_value_head_dim = {value}: without"
                " a GPU vLLM has linear attention for 64 of both or 128 of both; use a model with"
                " these, or a GPU"
            )
    width = sizes.expert_ffn_hidden_size if sizes else 0
    if on_cpu and width // rollout.tensor % 32:
        yield (
            f"model.path: experts of width {width} on rollout.tensor = {rollout.tensor}: without a"
            " GPU vLLM pads what is no multiple of 32, and no weight sync fits that; use a model"
            " with other experts, another rollout.tensor, or a GPU"
        )
    if on_cpu and rollout.expert_parallel:
        yield (
            "rollout.expert_parallel = True: vLLM's CPU kernel of experts crashes where a rank has"
            " not all of them; set it to false without a GPU"
        )
    if rollout.quantization is not None and (machine.compute_capability or (0, 0)) < (8, 9):
        yield (
            f"rollout.quantization = {rollout.quantization}: needs a GPU of compute"
            f" capability 8.9 or more, this machine has {_capability(machine)}; set"
            " rollout.quantization=null"
        )


def _capability(machine: Machine) -> str:
    if machine.compute_capability is None:
        return "no CUDA device"
    major, minor = machine.compute_capability
    return f"compute capability {major}.{minor}"


def _recipe(fp8: Fp8Config, machine: Machine) -> Iterator[str]:
    key = f"precision.fp8.recipe = {fp8.recipe}"
    if machine.compute_capability is None:
        yield f"{key}: FP8 needs a GPU, and there is no CUDA device; choose precision=bf16"
        return
    first, end = _CAPABILITY[fp8.recipe]
    if not first <= machine.compute_capability < end:
        remedy = _OTHER_RECIPE if machine.compute_capability >= (8, 9) else "choose precision=bf16"
        span = f"{first[0]}.{first[1]} or more"
        if end < (99, 0):
            span += f" and below {end[0]}.{end[1]}"
        yield (
            f"{key}: needs compute capability {span}, this GPU has {_capability(machine)}; {remedy}"
        )
    if machine.transformer_engine is None:
        yield (
            f"{key}: FP8 layers come from Transformer Engine, which cannot be imported here;"
            " install it, or choose precision=bf16"
        )
    elif _version(machine.transformer_engine) < _MIN_ENGINE[fp8.recipe]:
        wanted = ".".join(map(str, _MIN_ENGINE[fp8.recipe]))
        yield (
            f"{key}: needs Transformer Engine {wanted} or newer, here is"
            f" {machine.transformer_engine}; update it, or {_OTHER_RECIPE}"
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def linear_sizes(parallel: ParallelConfig, sizes: ModelSizes) -> dict[str, int]:
    """Rows and columns of the matrices of a layer on one rank, by what they are.

    Example: hidden 3584, 28 heads of 128, 4 key-value heads, feed-forward 18944 on tensor=4 give
    3584, 1152, 896 and 4736.
    """
    query_rows = sizes.num_heads * sizes.head_dim
    key_value_rows = 0 if sizes.latent_dim else 2 * sizes.num_kv_heads * sizes.head_dim
    if sizes.num_experts:
        what = "expert width of one expert-tensor rank"
        width = sizes.expert_ffn_hidden_size // parallel.expert_tensor
    else:
        what = "feed-forward width of one tensor rank"
        width = sizes.ffn_hidden_size // parallel.tensor
    rows = (query_rows + key_value_rows) // parallel.tensor
    return {
        "hidden_size": sizes.hidden_size,
        "query, key and value rows of one tensor rank": rows,
        "attention width of one tensor rank": query_rows // parallel.tensor,
        what: width,
    }


def _block_sizes(fp8: Fp8Config, parallel: ParallelConfig, sizes: ModelSizes) -> Iterator[str]:
    block = BLOCK[fp8.recipe]
    other = _OTHER_RECIPE if block > 16 else "choose precision=bf16"
    for what, size in linear_sizes(parallel, sizes).items():
        if size % block:
            yield (
                f"precision.fp8.recipe = {fp8.recipe}: the model's {what} is {size}, which does not"
                f" divide by {block}; lower parallel.tensor, or {other}"
            )
