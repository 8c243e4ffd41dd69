"""The stream of an update refuses what the checkpoint does not hold."""

import json

import pytest
import torch

from megatron_rl.checkpoints.hf import ShardWriter
from megatron_rl.engine.sampling import eos_token_ids
from megatron_rl.engine.weights.stream import checked_stream, expected_tensors
from megatron_rl.errors import WeightSyncError

EXPECTED = {"a": (2, 3), "b": (4,)}
A, B = torch.ones(2, 3), torch.arange(4.0)


def read(*items, dtype=torch.float32):
    return list(checked_stream(iter(items), EXPECTED, dtype))


def test_passes_on_what_is_expected_in_any_order():
    items = read(("b", B), ("a", A))
    assert [
        (name, tensor is wanted) for (name, tensor), wanted in zip(items, (B, A), strict=True)
    ] == [("b", True), ("a", True)]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", A)], r"1 of 2 tensors were not sent: b"),
        ([], r"2 of 2 tensors were not sent: a, b"),
        ([("c", A)], r"c was sent but the model has no such tensor; still missing: a, b"),
        ([("a", A), ("a", A)], r"a was sent twice"),
        ([("a", A.t())], r"a was sent with shape \[3, 2\], the model has \[2, 3\]"),
        ([("a", A.double())], r"a was sent as torch.float64, the engine takes torch.float32"),
        ([("a", A.bfloat16())], r"a was sent as torch.bfloat16, the engine takes torch.float32"),
    ],
)
def test_refuses(items, message):
    with pytest.raises(WeightSyncError, match=message):
        read(*items)


def test_an_engine_of_low_precision_takes_float32_and_its_own():
    assert read(("a", A), ("b", B.bfloat16()), dtype=torch.bfloat16)[1][0] == "b"
    with pytest.raises(
        WeightSyncError, match=r"torch.float16, the engine takes torch.bfloat16 or torch.float32"
    ):
        read(("a", A.half()), dtype=torch.bfloat16)


def test_the_refused_tensor_is_not_passed_on():
    seen = []
    with pytest.raises(WeightSyncError):
        seen.extend(checked_stream(iter([("a", A), ("b", A)]), EXPECTED, torch.float32))
    assert not seen or [name for name, _ in seen] == ["a"]


@pytest.mark.parametrize("tied", [False, True])
def test_expected_tensors(tmp_path, tied):
    writer = ShardWriter(tmp_path, max_bytes=40)
    for name, values in (
        ("model.embed_tokens.weight", A),
        ("lm_head.weight", A),
        ("model.norm.weight", B),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", B),
        ("model.layers.2.mlp.gate.weight", A),  # predicts the token after the next
    ):
        writer.add(name, values.clone())
    writer.close()
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    want = {
        "model.embed_tokens.weight": (2, 3),
        "model.norm.weight": (4,),
        "lm_head.weight": (2, 3),
    }
    if tied:
        del want["lm_head.weight"]
    assert expected_tensors(tmp_path) == want


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors"):
        expected_tensors(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"temperature": 0.6}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {}, ()),
    ],
)
def test_eos_token_ids(tmp_path, generation, config, want):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == want
