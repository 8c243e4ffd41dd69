"""HF -> megatron distributed checkpoint -> HF: bit-equal, and megatron itself reads what was
written."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from megatron_rl.runtime.digest import combined_digest, tensor_digest
from tests import warm, zoo
from tests.launch import run
from tests.numerics.small_policy import SHARDED, Case, build
from tests.ranks import call, on_ranks
from tools.convert_checkpoint import main, to_hf, to_megatron

NAMES = (
    "llama",
    "phi3",
    "olmo3",
    "qwen2_tied",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)
# Layouts into which the weights of a converted checkpoint are read.
CASES = [
    Case("tp2", {"tensor": 2}),
    Case("pp2", {"pipeline": 2}, "bfloat16", model="qwen2_tied"),
    Case("tp2_tied", {"tensor": 2}, model="qwen2_tied"),
    Case("ep2", {"expert": 2}, model="qwen3_moe"),
    Case("first_dense", {"pipeline": 2}, model="glm4_moe"),
    Case("latent", {"tensor": 2, "sequence": True}, model="deepseek_v3"),
    Case("windows", {"pipeline": 2}, model="gemma3"),
    Case("fused_files", {"tensor": 2, "sequence": True}, model="phi3"),
    Case("heads_norm", {"tensor": 2, "sequence": True}, model="olmo3"),
    Case("sinks", {"tensor": 2, "sequence": True}, model="gpt_oss"),
    Case("delta", {"tensor": 2, "sequence": True}, model="qwen3_next"),
    Case("four_matrices", {"tensor": 2, "sequence": True}, model="qwen3_5_moe"),
]
# Layouts that write a checkpoint of their own.
TRAINED = [
    Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
    Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
    Case("first_dense", {"expert": 2, **SHARDED}, model="glm4_moe"),
    Case("latent", {"pipeline": 2}, model="deepseek_v3"),
    Case("windows", {"tensor": 2, "sequence": True}, model="gemma3"),
    Case("fused_files", {"tensor": 2}, model="phi3"),
    Case("heads_norm", {"tensor": 2}, model="olmo3"),
    Case("sinks", {"expert": 2}, model="gpt_oss"),
    Case("delta", {"pipeline": 2}, model="qwen3_next"),
    Case("four_matrices", {"pipeline": 2}, model="qwen3_5"),
]
# Of families whose tensors lie as those of another one do.
OF_FULL_TIER = ("tp2_tied", "windows", "heads_norm", "sinks", "four_matrices")


def tiered(cases: list[Case]) -> list[Any]:
    """The cases as parameters with names."""
    return [
        pytest.param(
            case, id=case.name, marks=pytest.mark.full if case.name in OF_FULL_TIER else ()
        )
        for case in cases
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("convert")
    for name in NAMES:
        zoo.save_tiny_model(name, path / name)
        (path / name / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def converted(folder) -> Path:
    """What ``to_megatron`` makes of every model, beside it."""
    for name in NAMES:
        to_megatron(folder / name, folder / f"{name}_converted")
    return folder


def equal(one: Path, two: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    return sorted(a) == sorted(b) and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(folder, name):
    digest = to_megatron(folder / name, folder / f"{name}_there")
    assert to_hf(folder / f"{name}_there", folder / f"{name}_back", None, 10**9) == digest
    assert equal(folder / name, folder / f"{name}_back")
    tensors = load_file(folder / name / "model.safetensors")
    assert digest == combined_digest(
        {key: tensor_digest(tensor) for key, tensor in tensors.items()}
    )
    assert json.loads((folder / f"{name}_back" / "config.json").read_text()) == json.loads(
        (folder / name / "config.json").read_text()
    )
    assert (folder / f"{name}_back" / "tokenizer.json").read_text() == "{}"


def test_number_format_is_kept_and_files_are_split(folder, tmp_path):
    tensors = {
        key: tensor.bfloat16()
        for key, tensor in load_file(folder / "llama" / "model.safetensors").items()
    }
    source = tmp_path / "bf16"
    source.mkdir()
    config = json.loads((folder / "llama" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "there")
    to_hf(tmp_path / "there", tmp_path / "back", None, 50_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(index.values())) > 2 and sorted(index) == sorted(tensors)
    for name, file in index.items():
        got = load_file(tmp_path / "back" / file)[name]
        assert got.dtype == torch.bfloat16 and torch.equal(got, tensors[name])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_does_not_fit_is_refused(folder, tmp_path):
    tensors = load_file(folder / "llama" / "model.safetensors")
    source = tmp_path / "cut"
    source.mkdir()
    (source / "config.json").write_text((folder / "llama" / "config.json").read_text())
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"1 tensors are missing \['model.layers.2.mlp.up_proj.weight'\]"
    ):
        to_megatron(source, tmp_path / "there")
    words = ["to-hf", str(source), str(tmp_path / "x"), "--config", str(source)]
    command = [str(warm.python()), "tools/convert_checkpoint.py", *words]
    result = run(command, 60, check=False)
    assert (
        result.returncode == 1
        and "is not a distributed checkpoint" in result.stdout
        and "Traceback" not in result.stdout
    )
    to_megatron(folder / "llama", tmp_path / "llama")
    with pytest.raises(
        ValueError, match=r"holds no decoder\.layers\.self_attention\.linear_qkv\.bias"
    ):
        to_hf(tmp_path / "llama", tmp_path / "y", folder / "qwen2_tied", 10**9)
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    config = json.loads((folder / "llama" / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(
        ValueError,
        match=r"linear_fc1.weight has shape \(4, 192, 64\), but config.json means \(4, 160, 64\)",
    ):
        to_hf(tmp_path / "llama", tmp_path / "z", narrow, 10**9)


@pytest.fixture
def refused(capsys):
    """What the program says; it must end with 1, in one message, and leave nothing behind."""

    def convert(*arguments: object) -> str:
        words = list(map(str, arguments))
        assert main(words) == 1
        assert not list(Path(words[2]).parent.glob("*.tmp-partial"))
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return convert


def test_a_wrong_source_or_target_is_one_message_that_names_the_way_out(folder, tmp_path, refused):
    to_megatron(folder / "llama", tmp_path / "good")
    bare = tmp_path / "bare"
    shutil.copytree(tmp_path / "good", bare, ignore=shutil.ignore_patterns("hf"))
    assert "give --config HF_DIRECTORY" in refused("to-hf", bare, tmp_path / "x")
    assert "--config" in refused("to-hf", bare, tmp_path / "x", "--config", tmp_path)
    assert "but a HF directory already" in refused("to-hf", folder / "llama", tmp_path / "x")
    assert "to-hf makes one of it" in refused("to-nemo", bare, tmp_path / "x")
    assert "is not a distributed checkpoint" in refused("to-hf", tmp_path, tmp_path / "x")
    assert "is not a directory" in refused("to-hf", tmp_path / "nowhere", tmp_path / "x")
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/x: " in refused(
        "to-megatron", folder / "llama", tmp_path / "file" / "x"
    )


def test_a_damaged_source_is_named(folder, tmp_path, refused):
    to_megatron(folder / "llama", tmp_path / "good")
    shard = max((tmp_path / "good").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-3000])
    assert f"{tmp_path}/good to {tmp_path}/x: " in refused(
        "to-hf", tmp_path / "good", tmp_path / "x"
    )
    cut = tmp_path / "cut"
    shutil.copytree(folder / "llama", cut)
    (cut / "model.safetensors").write_bytes(
        (folder / "llama" / "model.safetensors").read_bytes()[:-100]
    )
    assert f"{cut}" in refused("to-megatron", cut, tmp_path / "x")
    to_megatron(folder / "llama", tmp_path / "whole")
    to_hf(tmp_path / "whole", tmp_path / "split", None, 50_000)
    part = sorted((tmp_path / "split").glob("model-*.safetensors"))[
        -1
    ]  # met only while the first ones are being written
    part.write_bytes(part.read_bytes()[:-100])
    assert "split" in refused("to-megatron", tmp_path / "split", tmp_path / "x")


@on_ranks(2)
@pytest.mark.parametrize("case", tiered(CASES))
def test_megatron_reads_it(converted, case):
    """TP, PP with tied embeddings, EP: every parameter equals what the policy reads from the HF
    directory."""
    policy = build(converted, case)
    want = [item.tensor.detach().clone() for item in policy.held]
    with torch.no_grad():
        for item in policy.held:
            item.tensor.fill_(7.0)
        state = [module.sharded_state_dict(metadata={}) for module in policy.modules]
        path = str(converted / f"{case.model}_converted")
        loaded = dist_checkpointing.load(dict(enumerate(state)), path)
        for chunk, module in enumerate(policy.modules):
            module.load_state_dict(loaded[chunk])
    for item, tensor in zip(policy.held, want, strict=True):
        kept = slice(None)
        if case.model == "llama" and item.parameter.slot.kind == "vocab":
            # Not the padding: the model has 123 tokens.
            first_row = policy.ranks.tensor_rank * tensor.shape[0]
            kept = slice(0, max(0, min(123 - first_row, tensor.shape[0])))
        assert torch.equal(item.tensor[kept], tensor[kept]), item.name
    policy.close()


@pytest.mark.parametrize("case", tiered(TRAINED))
def test_a_training_checkpoint_becomes_a_hf_directory(folder, tmp_path, case):
    call(2, save, folder, tmp_path / "saved", case)
    to_hf(tmp_path / "saved", tmp_path / "back", folder / case.model, 10**9)
    assert equal(folder / case.model, tmp_path / "back")


def save(models: Path, path: Path, case: Case) -> None:
    policy = build(models, case)
    policy.save(path, {"step": 0})
    policy.close()


def test_keys_and_configuration_of_nemo_2(folder, tmp_path):
    """A directory laid out as NeMo 2 does: weights/ with every key below "module.", norms under
    their own names, context/model.yaml."""
    to_megatron(folder / "llama", tmp_path / "plain")
    weights, context = tmp_path / "nemo" / "weights", tmp_path / "nemo" / "context"
    (tmp_path / "plain").rename(tmp_path / "weights")
    (tmp_path / "nemo").mkdir()
    (tmp_path / "weights").rename(weights)
    metadata = pickle.loads((weights / ".metadata").read_bytes())
    own = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}

    def renamed(key: str) -> str:
        return "module." + next(
            (key.replace(old, new) for old, new in own.items() if key.endswith(old)), key
        )

    metadata.state_dict_metadata = {
        renamed(key): value for key, value in metadata.state_dict_metadata.items()
    }
    metadata.storage_data = {
        replace(index, fqn=renamed(index.fqn)): value
        for index, value in metadata.storage_data.items()
    }
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    to_hf(tmp_path / "nemo", tmp_path / "back", folder / "llama", 10**9)
    assert equal(folder / "llama", tmp_path / "back")
    context.mkdir()
    (context / "model.yaml").write_text("config:\n  num_layers: 4\n  rotary_base: 1000000.0\n")
    with pytest.raises(
        ValueError, match=r"rotary_base is 1000000\.0 there, 10000\.0 in config.json"
    ):
        to_hf(tmp_path / "nemo", tmp_path / "wrong", folder / "llama", 10**9)
