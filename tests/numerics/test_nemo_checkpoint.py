"""NeMo 2 checkpoints written and read without NeMo, and (test_nemo_toolkit.py) the same with NeMo
at the other end."""

import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_rl.models import read_architecture
from tests import zoo
from tests.numerics.nemo_models import WRITTEN_BY_NEMO, read_fiddle, save_formula, save_tokenizer
from tests.numerics.test_convert_checkpoint import equal
from tools import nemo_context
from tools.convert_checkpoint import to_hf, to_megatron, to_nemo

# What a model of Transformer Engine's layers asks for: the keys of megatron-core's
# sharded_state_dict with Transformer Engine 2.11, below "module.". L: number of layers; extra
# states are objects, one a layer, expert and linear layer or norm.
ATTENTION = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": ("L", 64),
    "decoder.layers.self_attention.linear_qkv.weight": ("L", 128, 64),
    "decoder.layers.self_attention.linear_proj.weight": ("L", 64, 64),
    "decoder.final_layernorm.weight": (64,),
}
LLAMA = ATTENTION | {
    "embedding.word_embeddings.weight": (123, 64),
    "output_layer.weight": (123, 64),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": ("L", 64),
    "decoder.layers.mlp.linear_fc1.weight": ("L", 192, 64),
    "decoder.layers.mlp.linear_fc2.weight": ("L", 64, 96),
}
QWEN3_MOE = ATTENTION | {
    "embedding.word_embeddings.weight": (128, 64),
    "output_layer.weight": (128, 64),
    "decoder.layers.self_attention.q_layernorm.weight": ("L", 16),
    "decoder.layers.self_attention.k_layernorm.weight": ("L", 16),
    "decoder.layers.pre_mlp_layernorm.weight": ("L", 64),
    "decoder.layers.mlp.router.weight": ("L", 4, 64),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": ("L", 4, 96, 64),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": ("L", 4, 64, 48),
    # Only megatron's own layers ask for this one, where Transformer Engine's ask for
    # pre_mlp_layernorm.
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": ("L", 64),
}
STATES_LLAMA = {
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
}
STATES_QWEN3_MOE = {
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
}


# Of the families, what NeMo 2 has models for.
NAMES = [name for name in zoo.FAMILIES if name.removesuffix("_tied") in nemo_context.FAMILIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nemo")
    for name in NAMES:
        zoo.save_tiny_model(name, path / name)
        save_tokenizer(path / name)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(folder, name):
    digest = to_nemo(folder / name, folder / f"{name}_there")
    assert to_hf(folder / f"{name}_there", folder / f"{name}_back", None, 10**9) == digest
    assert equal(folder / name, folder / f"{name}_back")
    assert json.loads((folder / f"{name}_back" / "config.json").read_text()) == json.loads(
        (folder / name / "config.json").read_text()
    )
    assert to_megatron(folder / name, folder / f"{name}_plain") == digest


CASES = [("llama", 4, LLAMA, STATES_LLAMA), ("qwen3_moe", 2, QWEN3_MOE, STATES_QWEN3_MOE)]


@pytest.mark.parametrize(("name", "layers", "arrays", "states"), CASES)
@pytest.mark.parametrize(
    ("write", "weights", "prefix"), [(to_nemo, "weights", "module."), (to_megatron, ".", "")]
)
def test_keys_are_those_of_transformer_engine(
    folder, tmp_path, name, layers, arrays, states, write, weights, prefix
):
    write(folder / name, tmp_path / "there")
    stored = pickle.loads(
        (tmp_path / "there" / weights / ".metadata").read_bytes()
    ).state_dict_metadata
    shapes = {key: tuple(value.size) for key, value in stored.items() if hasattr(value, "size")}
    assert shapes == {
        prefix + key: tuple(layers if axis == "L" else axis for axis in shape)
        for key, shape in arrays.items()
    }
    wanted = {
        f"decoder.layers.{part}._extra_state/shard_{layer}_{layers}"
        for part in states
        for layer in range(layers)
    }
    wanted |= {"decoder.final_layernorm._extra_state/shard_0_1"}
    if "router" in str(arrays):
        experts = "decoder.layers.mlp.experts.experts"
        wanted |= {
            f"{experts}.{part}._extra_state/shard_{layer}.{expert}_{layers}.4"
            for part in ("linear_fc1", "linear_fc2")
            for layer in range(layers)
            for expert in range(4)
        }
    assert stored.keys() - shapes.keys() == {prefix + key for key in wanted}


def test_number_format_is_kept_and_told(folder, tmp_path):
    source = tmp_path / "bf16"
    source.mkdir()
    tensors = {
        key: tensor.bfloat16()
        for key, tensor in load_file(folder / "llama" / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text((folder / "llama" / "config.json").read_text())
    to_nemo(source, tmp_path / "there")
    to_hf(tmp_path / "there", tmp_path / "back", None, 10**9)
    assert equal(source, tmp_path / "back")
    config = read_fiddle(tmp_path / "there" / "context" / "io.json")["model"]["config"]
    assert (config["params_dtype"], config["bf16"], config["fp16"]) == (
        "torch.bfloat16",
        True,
        False,
    )
    assert "tokenizer" not in read_fiddle(tmp_path / "there" / "context" / "io.json")["model"], (
        "the source has none"
    )


def test_context_says_what_the_model_is(folder, tmp_path):
    to_nemo(folder / "llama", tmp_path / "llama")
    to_nemo(folder / "qwen3_moe", tmp_path / "moe")
    to_nemo(folder / "mistral", tmp_path / "mistral")
    llama, moe, mistral = (
        read_fiddle(tmp_path / name / "context" / "io.json")["model"]
        for name in ("llama", "moe", "mistral")
    )
    assert llama["callee"] == "nemo.collections.llm.gpt.model.llama.LlamaModel"
    expected = {
        "callee": "nemo.collections.llm.gpt.model.llama.Llama31Config",
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 123,
        "seq_length": 256,
        "rotary_base": 10000.0,
        "layernorm_epsilon": 1e-6,
        "share_embeddings_and_output_weights": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "init_method_std": 0.02,
        "params_dtype": "torch.float32",
        "bf16": False,
        "fp16": False,
        "scale_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "old_context_len": 32,
    }
    assert llama["config"] == expected
    assert (
        moe["config"].items()
        >= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 48,
            "qk_layernorm": True,
            "moe_router_pre_softmax": False,
            "max_position_embeddings": 256,
        }.items()
    )
    assert mistral["config"]["window_size"] is None, "NeMo's own default is a window of 4096"
    told = yaml.safe_load((tmp_path / "llama" / "context" / "model.yaml").read_text())
    assert (
        told["_target_"] == llama["callee"] and told["config"].pop("_target_") == expected["callee"]
    )
    assert told["config"].pop("params_dtype")["_target_"] == "torch.float32"
    assert told["config"].items() <= expected.items() and len(told["config"]) == len(expected) - 2
    tokenizer = json.loads(
        (tmp_path / "llama" / "context" / "nemo_tokenizer" / "tokenizer_config.json").read_text()
    )
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast", (
        "transformers 4, which NeMo 2 uses, knows no TokenizersBackend"
    )


def test_what_nemo_cannot_hold_is_refused_by_name(folder, tmp_path):
    arch, hf = read_architecture(folder / "qwen2")
    with pytest.raises(
        ValueError,
        match=(
            r"NeMo 2 has no model for 'gpt_oss'; it has llama, mistral, mixtral, qwen2, qwen3,"
            r" qwen3_moe"
        ),
    ):
        nemo_context.model_call(
            replace(arch, family="gpt_oss"), hf, torch.float32, has_tokenizer=False
        )
    with pytest.raises(ValueError, match="NeMo 2: 'qwen2' with a window"):
        windowed = replace(arch, window=4, windowed=(True,) * 4)
        nemo_context.model_call(windowed, hf, torch.float32, has_tokenizer=False)
    source = tmp_path / "scaled"
    source.mkdir()
    config = json.loads((folder / "qwen2" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": zoo.LLAMA3}))
    (source / "model.safetensors").write_bytes(
        (folder / "qwen2" / "model.safetensors").read_bytes()
    )
    with pytest.raises(ValueError, match=r"rope type 'llama3' for 'llama' only, not for 'qwen2'"):
        to_nemo(source, tmp_path / "there")
    assert not list(tmp_path.glob("there*")), "nothing is left of what was refused"
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": linear}))
    to_nemo(source, tmp_path / "linear")
    assert (
        read_fiddle(tmp_path / "linear" / "context" / "io.json")["model"]["config"][
            "seq_len_interpolation_factor"
        ]
        == 4.0
    )


def test_a_head_stored_beside_a_tied_embedding_must_equal_it(folder, tmp_path):
    """NeMo stores Qwen2 so. The tied model is the same as long as the two agree."""
    tensors = load_file(folder / "qwen2_tied" / "model.safetensors")
    config = json.loads((folder / "qwen2_tied" / "config.json").read_text())
    for name, change in (("same", 0.0), ("trained", 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({**config, "tie_word_embeddings": False})
        )
        save_file(
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + change},
            tmp_path / name / "model.safetensors",
        )
        to_nemo(tmp_path / name, tmp_path / f"{name}_there")
    to_hf(tmp_path / "same_there", tmp_path / "back", folder / "qwen2_tied", 10**9)
    assert equal(folder / "qwen2_tied", tmp_path / "back")
    with pytest.raises(
        ValueError,
        match=r"output_layer\.weight that differs from the embedding.*tie_word_embeddings true",
    ):
        to_hf(tmp_path / "trained_there", tmp_path / "wrong", folder / "qwen2_tied", 10**9)


def test_what_nemo_wrote_is_read(tmp_path):
    """A checkpoint written by nemo-toolkit 2.7.3 itself, kept in this folder; its context has the
    form that ours has."""
    with zipfile.ZipFile(WRITTEN_BY_NEMO) as archive:
        archive.extractall(tmp_path / "theirs")
    weights = save_formula(tmp_path / "hf")
    digest = to_nemo(tmp_path / "hf", tmp_path / "ours")
    assert to_hf(tmp_path / "theirs", tmp_path / "back", tmp_path / "hf", 10**9) == digest
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(weights) and all(
        torch.equal(back[name], weights[name]) for name in weights
    )

    theirs, ours = (
        read_fiddle(tmp_path / name / "context" / "io.json") for name in ("theirs", "ours")
    )
    assert (
        ours["callee"] == theirs["callee"] and ours["model"]["callee"] == theirs["model"]["callee"]
    )
    assert ours["trainer"]["callee"] == theirs["trainer"]["callee"]
    assert ours["trainer"]["strategy"]["callee"] == theirs["trainer"]["strategy"]["callee"]
    assert ours["model"]["tokenizer"] == theirs["model"]["tokenizer"]
    shared = ours["model"]["config"].keys() & theirs["model"]["config"].keys()
    assert len(shared) >= 12 and all(
        ours["model"]["config"][name] == theirs["model"]["config"][name] for name in shared
    )

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    )
    with pytest.raises(
        ValueError, match=r"rotary_base is 10000\.0 there, 500000\.0 in config.json"
    ):
        to_hf(tmp_path / "theirs", tmp_path / "wrong", tmp_path / "hf", 10**9)
