"""Model directories that are damaged or of another kind: refused with file, key, value and remedy,
before anything is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.model_config import read_model_config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.models.parameter_map import local_shape, model_parameters, shards
from megatron_rl.policy.state import weights
from tests.e2e.toy import write_model

ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())

POINTER = "version 1\noid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def model(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def change(path: Path, **keys) -> None:
    file = path / "config.json"
    values = {
        key: value
        for key, value in (json.loads(file.read_text()) | keys).items()
        if value != "absent"
    }
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("keys", "said"),
    ROWS["a_wrong_config_names_file_key_and_remedy"],
)
def test_a_wrong_config_names_file_key_and_remedy(model, keys, said):
    change(model, **keys)
    with pytest.raises(ValueError, match=said):
        read_architecture(model)


@pytest.mark.parametrize("keys", [{"num_key_value_heads": None}, {"max_position_embeddings": None}])
def test_what_may_be_null_is_taken_from_transformers(model, keys):
    change(model, **keys)
    assert read_model_config(model / "config.json", FAMILIES)["architectures"] == [
        "Qwen3ForCausalLM"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"architectures": [', r"config\.json is not JSON .*copy it again"),
        ("", r"config\.json is not JSON"),
        ('["Qwen3ForCausalLM"]', r"config\.json holds a list, not an object"),
        (POINTER, r"config\.json is a Git LFS pointer, not the file itself; run git lfs pull"),
    ],
)
def test_a_config_that_is_no_object(model, text, said):
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_architecture(model)


def cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def whole_numbers(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.int8
    )
    save_file(tensors, model / "model.safetensors")


def index(model: Path, **files: str) -> None:
    names = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names | files}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, r"model\.safetensors: .*; it is damaged or cut off; copy it again"),
        (
            lambda model: (model / "model.safetensors").write_bytes(b""),
            r"model\.safetensors: .*damaged or cut off",
        ),
        (
            lambda model: (model / "model.safetensors").write_text(POINTER),
            r"model\.safetensors is a Git LFS pointer.*git lfs pull",
        ),
        (
            lambda model: index(model, x="model-00002.safetensors"),
            r"model-00002\.safetensors is not there, but the index",
        ),
        (
            lambda model: index(model, x="model.safetensors"),
            r"model\.safetensors holds no tensor x, but the index says so",
        ),
        (
            lambda model: index(model, x="../model.safetensors"),
            r"index\.json has no weight_map of tensors to file names",
        ),
        (
            lambda model: (model / "model.safetensors.index.json").write_text("[]"),
            r"index\.json holds a list",
        ),
        (
            whole_numbers,
            r"model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight is I8, not a float",
        ),
    ],
)
def test_damaged_weights_name_the_file(model, damage, said):
    damage(model)
    with pytest.raises(ValueError, match=said):
        HfDirectory(model)


def held(path: Path) -> tuple[list[weights.LocalParameter], object]:
    """Parameters of the whole model on one rank, without megatron's modules around them."""
    arch, _ = read_architecture(path)
    found = []
    for parameter in model_parameters(arch):
        tensor = torch.empty(local_shape(parameter, arch, arch.vocab_size, 1))
        name = parameter.slot.megatron
        found.append(
            weights.LocalParameter(
                0, name, tensor, parameter, shards(parameter, arch, arch.vocab_size, 0, 1)
            )
        )
    return found, arch


def poison(model: Path, name: str, rows: int, value: float) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name][:rows] = value
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_number(model, world, value):
    poison(model, "model.layers.1.mlp.down_proj.weight", 1, value)
    poison(model, "model.norm.weight", 2, value)
    with pytest.raises(
        ValueError,
        match=(
            r"not finite: model\.layers\.1\.mlp\.down_proj\.weight \(96 values\),"
            r" model\.norm\.weight \(2 v"
        ),
    ):
        weights.load(*held(model), model)
    parameters, arch = held(model)
    weights.load(parameters, arch, model, require_finite=False)
    assert sum(not item.tensor.isfinite().all() for item in parameters) == 2


def test_a_head_of_its_own_must_equal_the_embedding_it_is_tied_to(model, world):
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    weights.load(*held(model), model)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=(
            r"stores an lm_head\.weight that differs from"
            r" model\.embed_tokens\.weight.*tie_word_embeddings"
        ),
    ):
        weights.load(*held(model), model)


def test_the_tokenizer_has_no_token_beyond_the_vocabulary(model):
    assert load_tokenizer(model).eos_token_id == 1
    change(model, vocab_size=9)
    with pytest.raises(
        ValueError,
        match=(
            r"2 tokens of the tokenizer lie beyond vocab_size = 9 of config\.json \('h' = 9, '\?' ="
            r" 10\)"
        ),
    ):
        load_tokenizer(model)


def test_a_tokenizer_file_that_is_no_tokenizer_is_one_message(model):
    (model / "tokenizer.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"its tokenizer files cannot be read: .*copy them again from the model"
    ):
        load_tokenizer(model)
