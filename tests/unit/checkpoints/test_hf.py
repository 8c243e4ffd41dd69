import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoints.hf import ShardWriter, copy_companions, write_config


def tensors():
    # 16, 40, 24 and 8 bytes.
    return {
        "a": torch.arange(4.0),
        "b": torch.arange(10.0),
        "c": torch.arange(6.0).view(2, 3).t(),
        "d": torch.arange(4).bfloat16(),
    }


def write(path, max_bytes):
    writer = ShardWriter(path, max_bytes)
    for name, tensor in tensors().items():
        writer.add(name, tensor)
    writer.close()


@pytest.mark.parametrize(
    ("max_bytes", "sizes"),
    [
        (32, [["a"], ["b"], ["c", "d"]]),
        (56, [["a", "b"], ["c", "d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_files_are_filled_in_order_up_to_the_limit(tmp_path, max_bytes, sizes):
    write(tmp_path, max_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 88
    for number, names in enumerate(sizes):
        file = f"model-{number + 1:05d}-of-{len(sizes):05d}.safetensors"
        assert [name for name, where in index["weight_map"].items() if where == file] == names
        for name, tensor in load_file(tmp_path / file).items():
            assert torch.equal(tensor, tensors()[name]) and tensor.dtype == tensors()[name].dtype
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        {*index["weight_map"].values(), "model.safetensors.index.json"}
    )


def test_one_file_has_no_index(tmp_path):
    write(tmp_path, 88)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_number_format_is_told_under_the_key_that_was_there(tmp_path, key):
    source = tmp_path / "in"
    target = tmp_path / "out"
    source.mkdir(), target.mkdir()
    (source / "config.json").write_text(json.dumps({key: "float32", "vocab_size": 7}))
    write_config(source, target, "bfloat16")
    assert json.loads((target / "config.json").read_text()) == {key: "bfloat16", "vocab_size": 7}


def test_tokenizer_files_are_copied_and_weights_are_not(tmp_path):
    source = tmp_path / "in"
    target = tmp_path / "out"
    source.mkdir(), target.mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "pytorch_model.bin",
        "config.json",
        "README.md",
    ):
        (source / name).write_text(name)
    copy_companions(source, target)
    assert {file.name: file.read_text() for file in target.iterdir()} == {
        name: name for name in ("tokenizer.json", "chat_template.jinja")
    }
