"""What the tests of NeMo 2 checkpoints share: a model whose weights follow from their names, and
fiddle's JSON read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

# How it was made: `nemo_worker.py write HF_DIRECTORY nemo2_qwen2` of nemo-toolkit 2.7.3,
# HF_DIRECTORY from ``save_formula``.
WRITTEN_BY_NEMO = Path(__file__).with_name("nemo2_qwen2.zip")


def formula_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """float32 tensors of the model's shapes, exact in bfloat16, too, each different."""
    found = {}
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        steps = torch.arange(parameter.numel()) * 37 + index * 11
        found[name] = ((steps % 251 - 125) / 64).view(parameter.shape)
    return found


def save_formula(path: Path) -> dict[str, Tensor]:
    """Writes a HF directory (Qwen2, 2 layers) with the weights of the formula, which are
    returned."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
    )
    path.mkdir()
    config.save_pretrained(path)
    weights = formula_weights(Qwen2ForCausalLM(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(path)
    return weights


def save_tokenizer(path: Path) -> None:
    """A word-level tokenizer of 30 words, saved as transformers 5 does."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({f"<t{index}>": index for index in range(30)}, unk_token="<t0>")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<t0>", bos_token="<t1>", eos_token="<t2>"
    ).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def read_fiddle(file: Path) -> dict[str, Any]:
    """The tree of an io.json: each object a dictionary of its arguments and its callable under
    "callee"."""
    document = json.loads(file.read_text())
    objects = document["objects"]

    def value(node: Any) -> Any:
        kind = node["type"]
        if kind == "leaf":
            return node["value"]
        if kind == "pyref":
            return f"{node['module']}.{node['name']}"
        if kind == "ref":
            return value(objects[node["key"]])
        parts = [value(part) if isinstance(part, dict) else part for _, part in node["items"]]
        if value(kind) in ("builtins.tuple", "builtins.dict"):
            return parts
        if value(kind).endswith("BuildableTraverserMetadata"):
            return {"callee": parts[0], "names": parts[1]}
        assert value(kind) == "fiddle._src.config.Config", value(kind)
        meta = value(node["metadata"])
        return {"callee": meta["callee"], **dict(zip(meta["names"], parts, strict=True))}

    tree: dict[str, Any] = value(document["root"])
    return tree
