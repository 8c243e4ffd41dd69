"""Tiny models of every family with random weights, as HF models, HF directories and policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from megatron_rl.passes import TokenScores
from tests.tiny_options import (
    DELTA,
    EXPERTS,
    LATENT,
    LLAMA3,
    TURNS,
    TWO_BASES,
    YARN2,
    YARN_OR_PLAIN,
)

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config, ModelConfig
    from megatron_rl.policy.megatron_policy import MegatronPolicy

SMALL: dict[str, Any] = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    num_hidden_layers=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# Family -> the prefix of its classes in transformers.
CLASSES = {
    "qwen2": "Qwen2",
    "qwen2_tied": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_yarn": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "mistral_window": "Mistral",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "glm4_moe": "Glm4Moe",
    "gemma3": "Gemma3",
    "gemma3_yarn": "Gemma3",
    "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v3": "DeepseekV3",
    "moonlight": "DeepseekV3",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_5_vl_tied": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5_vl": "Qwen3_5",
    "qwen3_5_moe_vl": "Qwen3_5Moe",
}
# What transformers calls the configuration of a text model otherwise.
TEXT_PARTS = ("gemma3", "gemma3_yarn", "qwen3_5", "qwen3_5_moe")
# Layers with linear attention.
LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_vl", "qwen3_5_moe_vl")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(vocab_size=128, tie_word_embeddings=False),
    "qwen2_tied": dict(vocab_size=128, tie_word_embeddings=True),
    "qwen3": dict(vocab_size=128, head_dim=24, tie_word_embeddings=True),
    "qwen3_yarn": dict(
        vocab_size=128, head_dim=16, tie_word_embeddings=False, rope_parameters=YARN2
    ),
    "llama": dict(vocab_size=123, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "mistral": dict(vocab_size=128, head_dim=16, sliding_window=None, tie_word_embeddings=False),
    "mistral_window": dict(
        vocab_size=128, head_dim=16, sliding_window=6, tie_word_embeddings=False
    ),
    "phi3": dict(vocab_size=128, tie_word_embeddings=False),
    "olmo2": dict(vocab_size=128, tie_word_embeddings=False),
    "olmo3": dict(
        vocab_size=128,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=YARN_OR_PLAIN,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": dict(
        vocab_size=128, head_dim=16, tie_word_embeddings=False, num_hidden_layers=2, **EXPERTS
    ),
    "glm4_moe": dict(
        vocab_size=128,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
    ),
    "gemma3": dict(
        vocab_size=128,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=TWO_BASES,
    ),
    "gpt_oss": dict(
        vocab_size=128,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rms_norm_eps=1e-5,
        rope_parameters=YARN2 | dict(truncate=False),
        tie_word_embeddings=False,
    ),
    "qwen3_next": DELTA | EXPERTS | dict(shared_expert_intermediate_size=56),
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA | EXPERTS | dict(shared_expert_intermediate_size=56),
    "deepseek_v3": LATENT,
    "moonlight": LATENT
    | dict(
        q_lora_rank=None,
        v_head_dim=24,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=2,
        rope_parameters=None,
        num_hidden_layers=2,
    ),
    "mixtral": dict(
        vocab_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        tie_word_embeddings=False,
        num_hidden_layers=2,
    ),
}
FAMILIES["gemma3_yarn"] = FAMILIES["gemma3"] | dict(rope_parameters=YARN_OR_PLAIN)


# Vision-language models: the settings beside those of their text part.
IMAGE_TOKEN = 5
SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": dict(tie_word_embeddings=False),
    "qwen2_5_vl_tied": dict(tie_word_embeddings=True),
    "qwen3_vl": dict(tie_word_embeddings=False),
    "qwen3_vl_moe": dict(tie_word_embeddings=False),
    "qwen3_5_vl": dict(tie_word_embeddings=False),
    "qwen3_5_moe_vl": dict(tie_word_embeddings=False),
}
SEEING_TEXT: dict[str, Any] = dict(
    vocab_size=128,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
)
SMALL_TOWER: dict[str, Any] = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
# Attention over windows of two tokens in one block, over whole images in the other.
TOWER = SMALL_TOWER | dict(window_size=56, fullatt_block_indexes=[1])
# Of Qwen3-VL: learned positions of a square of 4 by 4, and features of the first block for the
# first decoder layer.
SQUARE_TOWER = SMALL_TOWER | dict(num_position_embeddings=16)
DEEP_TOWER = SQUARE_TOWER | dict(deepstack_visual_indexes=[0])
SPECIAL_IDS: dict[str, int] = dict(
    image_token_id=IMAGE_TOKEN,
    video_token_id=6,
    vision_start_token_id=3,
    vision_end_token_id=4,
)


def seeing_config(text: dict[str, Any], **more: Any) -> Any:
    """The configuration of a Qwen2.5-VL with this text part and a tower of two blocks."""
    tower = TOWER | dict(out_hidden_size=text["hidden_size"])
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, **(SPECIAL_IDS | more)
    )


def deep_model(family: str, text: dict[str, Any], tower: dict[str, Any], **more: Any) -> Any:
    """A Qwen3-VL or 3.5, dense or with experts, with these parts."""
    config = getattr(transformers, f"{CLASSES[family]}Config")
    model = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")
    return model(config(text_config=text, vision_config=tower, **more))


def transformer(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    """A model of transformers with these settings and the weights that it begins with."""
    if family.startswith("qwen3") and family in SEEING:
        tower = SQUARE_TOWER if family in LINEAR else DEEP_TOWER
        deep = tower | dict(out_hidden_size=settings["hidden_size"])
        return deep_model(family, settings, deep, **SPECIAL_IDS, **SEEING[family])
    if family in SEEING:
        config = seeing_config(settings, **SEEING[family])
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    kind = CLASSES[family] + ("Text" if family in TEXT_PARTS else "")
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)


def tiny_model(family: str, seed: int = 0, layers: int | None = None) -> PreTrainedModel:
    """The model in float32, evaluation mode; norms and biases away from their initial values."""
    settings = SMALL | (SEEING_TEXT if family in SEEING else FAMILIES[family])
    if family.startswith("qwen3_vl"):
        rope = settings["rope_parameters"] | dict(mrope_interleaved=True)
        settings |= dict(head_dim=16, rope_parameters=rope)
    if family in LINEAR and family in SEEING:
        settings |= DELTA | dict(rope_parameters=TURNS)
    if family in ("qwen3_vl_moe", "qwen3_5_moe_vl"):
        settings |= EXPERTS
    if layers is not None:
        settings["num_hidden_layers"] = layers
    draw = torch.Generator().manual_seed(seed)
    model = transformer(family, settings).float().eval()
    with torch.no_grad():
        biases = [one for one in model.named_buffers() if one[0].endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() == 1:
                is_norm = "norm" in name or "ln_q" in name
                centered = family in ("gemma3", "gemma3_yarn", *LINEAR) and not re.search(
                    "linear_attn|visual", name
                )
                center = 1.0 if is_norm and not centered else 0.0
                parameter.copy_(noise * 0.1 + center)
            elif "visual" in name or "conv1d" in name:
                # Features that carry their image.
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                # Small states would make gradients of a delta net's norm large, and inexact.
                is_large = family in LINEAR and "embed" in name
                parameter.copy_(noise * (0.4 if is_large else 0.05))
    return model


def save_tiny_model(family: str, path: Path, seed: int = 0, layers: int | None = None) -> Path:
    """Writes the HF directory of ``tiny_model``."""
    model = tiny_model(family, seed, layers)
    model.config.architectures = [type(model).__name__]
    save(model, path)
    return path


def save(model: Any, path: Path) -> None:
    """Writes the HF directory. Published files of Qwen3-VL-MoE have matrices of experts as
    ``[experts, in, out]``, those of Qwen3.5 as ``[experts, out, in]``; transformers reads those,
    and writes the other order, or a tensor for each expert."""
    model.save_pretrained(path)
    if model.config.model_type in ("qwen3_vl_moe", "qwen3_5_moe"):
        file = path / "model.safetensors"
        tensors = {name: x for name, x in load_file(file).items() if ".experts." not in name}
        for name, values in model.state_dict().items():
            if ".experts." in name:
                turned = model.config.model_type == "qwen3_vl_moe"
                tensors[name] = (values.transpose(1, 2) if turned else values).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def has_experts(family: str) -> bool:
    return "moe" in family or any("experts" in key for key in FAMILIES.get(family, {}))


def of_all_rows(scores: TokenScores) -> TokenScores:
    """Collective: the scores of a batch that every data-parallel rank holds, of whose rows each has
    scored some; the others are 0 there."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()

    def total(values: Tensor) -> Tensor:
        result = values.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    return scores.map(total)


def configured(path: Path, *overrides: str) -> Config:
    """The configuration of a run with this model, without data."""
    from megatron_rl.config.load import compose, validate
    from megatron_rl.config.schema import Config

    values = compose("config", [f"model.path={path}", "data.train=-", "data.eval=-", *overrides])
    return validate(Config, values, "test")


def configured_policy(run: Config, tokens: int = 128, **settings: Any) -> MegatronPolicy:
    """``tokens``: of a micro-batch and, at the most, of a sequence; ``settings``: more fields."""
    from megatron_rl.policy.megatron_policy import MegatronPolicy
    from megatron_rl.policy.settings import PolicySettings

    fields: dict[str, Any] = dict(
        temperature=1.0,
        keep_reference=False,
        total_optimizer_steps=10,
        max_sequence_tokens=tokens,
        tokens_per_microbatch=tokens,
    )
    chosen = PolicySettings(**(fields | settings))
    return MegatronPolicy(run.model, run.parallel, run.precision, run.optim, chosen)


def model_config(path: Path, **given: Any) -> ModelConfig:
    """The section of a model, with its defaults where nothing else is ``given``."""
    from megatron_rl.config.load import compose, validate
    from megatron_rl.config.schema import ModelConfig

    fields = compose("model/hf")
    lora = fields["lora"] | given.pop("lora", {})
    return validate(ModelConfig, fields | {"path": str(path), "lora": lora} | given, "test")


def build_policy(
    path: Path,
    layout: dict[str, Any],
    params: str = "float32",
    *,
    make_vocab_divisible_by: int = 64,
    freeze_vision: bool = False,
    lora: dict[str, Any] | None = None,
    teacher: dict[str, str] | None = None,
    **settings: Any,
) -> MegatronPolicy:
    """The policy of a HF directory; ``layout``: what differs from one rank. ``settings`` may hold
    an ``optim``; the rest is of PolicySettings. ``lora``: what of its section is given."""
    from types import SimpleNamespace

    from tests.numerics.policy_cases import optim, parallel, precision

    model = model_config(
        path,
        make_vocab_divisible_by=make_vocab_divisible_by,
        freeze_vision=freeze_vision,
        lora=lora or {},
        teacher=teacher,
    )
    run: Any = SimpleNamespace(
        model=model,
        parallel=parallel(**layout),
        precision=precision(params),
        optim=settings.pop("optim", None) or optim(),
    )
    return configured_policy(run, 512, **settings)


def tiny_policy(
    path: Path, layout: dict[str, Any], params: str = "float32", **more: Any
) -> MegatronPolicy:
    """Of short sequences, with a reference."""
    from tests.numerics.policy_reference import TEMPERATURE

    fields: dict[str, Any] = dict(
        temperature=TEMPERATURE,
        keep_reference=True,
        max_sequence_tokens=64,
        tokens_per_microbatch=64,
        make_vocab_divisible_by=16,
    )
    return build_policy(path, layout, params, **(fields | more))
