"""The part of a NeMo 2 checkpoint that says what its weights are: ``context/``.

NeMo rebuilds its objects from io.json, the JSON form of a configuration tree of the library
fiddle: each object is a callable and its arguments. model.yaml is the same tree for people and for
tools without NeMo. Both are written here without either library, with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_rl.checkpoints.hf import copy_companions
from megatron_rl.config.model_config import format_name
from megatron_rl.errors import concerning
from megatron_rl.models import Architecture

CONTEXT = "context"
# Field of NeMo's configuration -> field of Architecture. Shapes would not show a wrong rotary base.
FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "ffn_hidden_size": "ffn_hidden_size",
    "rotary_base": "rope_theta",
    "layernorm_epsilon": "norm_eps",
}
TOKENIZER = "nemo_tokenizer"
MODELS = "nemo.collections.llm.gpt.model"
# Our family -> NeMo's model (in a file of that name) and configuration.
FAMILIES = {
    "llama": ("Llama", "LlamaConfig"),
    "qwen2": ("Qwen2", "Qwen2Config"),
    "qwen3": ("Qwen3", "Qwen3Config"),
    "qwen3_moe": ("Qwen3", "Qwen3MoEConfig"),
    "mistral": ("Mistral", "MistralConfig7B"),
    "mixtral": ("Mixtral", "MixtralConfig"),
}
# NeMo's export to HF reads their field max_position_embeddings.
_WITH_POSITIONS = ("Qwen3Config", "Qwen3MoEConfig", "MixtralConfig")


@dataclass(frozen=True)
class Name:
    """Something importable: ``Name("torch", "bfloat16")``."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A callable and its arguments: plain values, names, calls."""

    callee: Name
    arguments: Mapping[str, Any]


def check_model(path: Path, arch: Architecture) -> None:
    """Raises ValueError when ``path`` is a NeMo 2 checkpoint of another model than ``arch``, or its
    description cannot be read. Directories without NeMo's files are not checked."""
    file = path / CONTEXT / "model.yaml"
    if not file.is_file():
        return
    unreadable = (yaml.YAMLError, UnicodeError, TypeError, KeyError)
    with concerning(f"{file} cannot be read", "copy the checkpoint again", unreadable):
        written = yaml.safe_load(file.read_text(encoding="utf-8"))["config"]
        there = {theirs: written[theirs] for theirs in FIELDS if theirs in written}
    wrong = [
        f"{theirs} is {value!r} there, {getattr(arch, FIELDS[theirs])!r} in config.json"
        for theirs, value in there.items()
        if value != getattr(arch, FIELDS[theirs])
    ]
    if wrong:
        raise ValueError(
            f"{file} describes another model: {'; '.join(wrong)}; give the config.json of this one"
        )


def model_call(arch: Architecture, hf: Any, dtype: torch.dtype, has_tokenizer: bool) -> Call:
    """NeMo's model for ``arch``, with weights of ``dtype``.

    ``hf``: the transformers configuration.

    Raises:
        ValueError: NeMo 2 has no such model.
    """
    if arch.family not in FAMILIES:
        raise ValueError(
            f"NeMo 2 has no model for {arch.family!r}; it has {', '.join(sorted(FAMILIES))}. Use"
            " to-megatron instead"
        )
    model, config = FAMILIES[arch.family]
    module = f"{MODELS}.{model.lower()}"
    if arch.rope_type == "yarn" or arch.windowed:
        what = "a window" if arch.windowed else "rope type 'yarn'"
        raise ValueError(f"NeMo 2: {arch.family!r} with {what}. Use to-megatron instead")
    if arch.rope_type == "llama3":
        if arch.family != "llama":
            raise ValueError(
                f"NeMo 2 has rope type 'llama3' for 'llama' only, not for {arch.family!r}. Use"
                " to-megatron instead"
            )
        config = "Llama31Config"
    fields: dict[str, Any] = {theirs: getattr(arch, ours) for theirs, ours in FIELDS.items()}
    fields |= dict(
        kv_channels=arch.head_dim,
        vocab_size=arch.vocab_size,
        seq_length=arch.max_positions,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        init_method_std=hf.initializer_range,
        params_dtype=Name("torch", format_name(dtype)),
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        **_rope(arch, hf),
    )
    if arch.family == "mistral":  # defaults of theirs that do not fit the family
        fields |= dict(window_size=None, cp_comm_type=None)
    if config in _WITH_POSITIONS:
        fields["max_position_embeddings"] = arch.max_positions
    if arch.num_experts:
        fields |= dict(
            num_moe_experts=arch.num_experts,
            moe_router_topk=arch.experts_per_token,
            moe_ffn_hidden_size=arch.expert_ffn_hidden_size,
            moe_router_pre_softmax=False,
        )
    arguments: dict[str, Any] = {"config": Call(Name(module, config), fields)}
    if has_tokenizer:
        auto = Name(
            "nemo.collections.common.tokenizers.huggingface.auto_tokenizer", "AutoTokenizer"
        )
        named = {"pretrained_model_name": TOKENIZER, "trust_remote_code": False}
        arguments["tokenizer"] = Call(auto, named)
    return Call(Name(module, f"{model}Model"), arguments)


def _rope(arch: Architecture, hf: Any) -> dict[str, Any]:
    rope = hf.rope_parameters
    if arch.rope_type == "llama3":
        return dict(
            scale_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            old_context_len=rope["original_max_position_embeddings"],
        )
    if arch.rope_type == "linear":
        return {"seq_len_interpolation_factor": rope["factor"]}
    return {}


def has_tokenizer(source: Path) -> bool:
    """Whether a HF directory has tokenizer files."""
    return (source / "tokenizer_config.json").is_file()


def write_context(source: Path, context: Path, model: Call) -> None:
    """Writes ``context/`` for ``model``, with the tokenizer of the HF directory ``source``."""
    context.mkdir()
    megatron = Name("nemo.lightning.pytorch.strategies.megatron_strategy", "MegatronStrategy")
    strategy = Call(megatron, {"ckpt_save_optimizer": False})
    settings = {"accelerator": "cpu", "strategy": strategy, "devices": 1}
    trainer = Call(Name("nemo.lightning.pytorch.trainer", "Trainer"), settings)
    parts = {"model": model, "trainer": trainer}
    root = Call(Name("nemo.lightning.io.pl", "TrainerContext"), parts)
    (context / "io.json").write_text(json.dumps(_fiddle(root)) + "\n", encoding="ascii")
    (context / "model.yaml").write_text(yaml.safe_dump(_yaml(model)), encoding="ascii")
    if "tokenizer" in model.arguments:
        (context / TOKENIZER).mkdir()
        copy_companions(source, context / TOKENIZER)
        file = context / TOKENIZER / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        # The name since transformers 5; NeMo 2 has transformers 4.
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="ascii")


def _fiddle(root: Call) -> dict[str, Any]:
    """The tree as fiddle serializes it.

    NeMo finds a part by its path, as in ``<root>.model.config``.
    """
    objects: dict[str, Any] = {}

    def reference(name: Name) -> dict[str, Any]:
        return {"type": "pyref", "module": name.module, "name": name.name}

    def plain(kind: str, items: list[Any]) -> dict[str, Any]:
        return {"type": reference(Name("builtins", kind)), "items": items, "metadata": None}

    def add(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Name):
            return reference(value)
        if not isinstance(value, Call):
            return {"type": "leaf", "value": value}
        arguments = value.arguments.items()
        items = [[f"Attr(name='{name}')", add(part, f"{path}.{name}")] for name, part in arguments]
        names = [[f"Index(index={index})", name] for index, name in enumerate(value.arguments)]
        empty = {**plain("dict", []), "metadata": plain("tuple", [])}
        attributes = {
            "fn_or_cls": reference(value.callee),
            "argument_names": plain("tuple", names),
            "argument_tags": empty,
            "argument_history": empty,
        }
        metadata = [[f"Attr(name='{name}')", part] for name, part in attributes.items()]
        kind = reference(Name("fiddle._src.config", "BuildableTraverserMetadata"))
        objects[path] = {
            "type": reference(Name("fiddle._src.config", "Config")),
            "items": items,
            "metadata": {"type": kind, "items": metadata, "metadata": kind},
            "paths": [path],
        }
        return {"type": "ref", "key": path}

    return {
        "root": add(root, "<root>"),
        "objects": objects,
        "refcounts": dict.fromkeys(objects, 1),
        "version": "0.0.1",
    }


def _yaml(value: Any) -> Any:
    if isinstance(value, Name):
        return {"_target_": f"{value.module}.{value.name}", "_call_": False}
    if isinstance(value, Call):
        target = {"_target_": f"{value.callee.module}.{value.callee.name}"}
        return target | {name: _yaml(part) for name, part in value.arguments.items()}
    return value
