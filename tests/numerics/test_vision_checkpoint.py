"""Checkpoints, exports and conversions of a vision-language policy (real megatron-core)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatron_rl.passes import LocalBatch
from tests.numerics.policy_reference import ENTROPY, relative_error
from tests.numerics.seeing import (
    hf_logits,
    published_name,
    rows_of,
    seeing_policy,
    seeing_reference,
)
from tests.ranks import on_ranks
from tools.convert_checkpoint import to_hf, to_megatron, to_nemo

VL = "qwen2_5_vl"
DEEP = "qwen3_vl"
MOE = "qwen3_vl_moe"
TIED = "qwen2_5_vl_tied"
SEQUENCE: dict[str, Any] = dict(tensor=2, sequence=True)
SHARDED: dict[str, Any] = dict(distributed_optimizer=True)


@on_ranks(2, timeout=200.0)
@pytest.mark.parametrize(
    ("name", "written", "read", "frozen"),
    [
        (TIED, SEQUENCE, dict(pipeline=2), False),
        (VL, dict(SHARDED), dict(SHARDED, tensor=2), False),
        (VL, dict(SHARDED, **SEQUENCE), dict(SHARDED, pipeline=2), True),
        (DEEP, dict(SHARDED, **SEQUENCE), dict(SHARDED, pipeline=2), False),
        (MOE, dict(SHARDED, **SEQUENCE, expert=2), dict(SHARDED, pipeline=2), False),
    ],
    ids=["tied", "sharded", "frozen", "deep", "experts"],
)
def test_a_checkpoint_goes_on_in_another_layout(
    seeing_models: Path, tmp_path: Path, name: str, written: Any, read: Any, frozen: bool
) -> None:
    wanted = seeing_reference(name, None)
    batch = wanted["batch"]
    one = seeing_policy(seeing_models / name, written, freeze_vision=frozen)
    one.update(LocalBatch(batch, rows_of(one)), wanted["loss"], ENTROPY)
    one.save(tmp_path / "checkpoint", {"step": 1})
    saved = {key: value.clone() for key, value in one.gathered_weights()}
    reference = one.score_alone(batch, reference=True).logprobs
    one.update(LocalBatch(batch, rows_of(one)), wanted["loss"], ENTROPY)
    next_weights = {key: value.clone() for key, value in one.gathered_weights()}
    one.close()
    two = seeing_policy(seeing_models / name, read, freeze_vision=frozen)
    assert two.load(tmp_path / "checkpoint") == {"step": 1}
    loaded = dict(two.gathered_weights())
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert (two.score_alone(batch, reference=True).logprobs - reference).abs().max() <= 5e-6
    two.update(LocalBatch(batch, rows_of(two)), wanted["loss"], ENTROPY)
    moved = {key: value - saved[key] for key, value in two.gathered_weights()}
    assert relative_error(moved, {key: next_weights[key] - saved[key] for key in saved}) <= 1e-5


@on_ranks(1)
def test_a_checkpoint_of_a_trained_tower_does_not_fit_a_frozen_one(
    seeing_models: Path, tmp_path: Path
) -> None:
    one = seeing_policy(seeing_models / VL, {})
    one.save(tmp_path / "checkpoint", {})
    one.close()
    two = seeing_policy(seeing_models / VL, {}, freeze_vision=True)
    with pytest.raises(ValueError, match=r"model\.freeze_vision is False there and True here"):
        two.load(tmp_path / "checkpoint")


@on_ranks(2)
def test_an_export_opens_in_transformers(seeing_models: Path, tmp_path: Path) -> None:
    wanted = seeing_reference(VL, None)
    batch = wanted["batch"]
    policy = seeing_policy(seeing_models / VL, SEQUENCE)
    policy.update(LocalBatch(batch, rows_of(policy)), wanted["loss"], ENTROPY)
    logprobs = policy.score_alone(batch, temperature=1.0).logprobs
    exported = [tmp_path / "export"]
    dist.broadcast_object_list(exported, src=0)
    policy.export(exported[0])
    hf, notes = AutoModelForImageTextToText.from_pretrained(
        exported[0], dtype=torch.float32, output_loading_info=True
    )
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = dict(policy.gathered_weights())
    for name, parameter in hf.named_parameters():
        assert torch.equal(parameter, weights[published_name(name)]), name
    first, prompt = int(batch.lengths[0]), int(batch.prompt_lengths[0])
    tokens = batch.token_ids[:first]
    logits = hf_logits(hf.eval(), tokens, prompt, batch.images[0])[prompt - 1 : -1]
    answer = torch.log_softmax(logits, -1).gather(1, tokens[prompt:, None])[:, 0]
    assert float((answer - logprobs[: len(answer)]).abs().max()) <= 5e-6


@pytest.mark.parametrize("name", [VL, TIED, DEEP, MOE])
def test_a_conversion_and_back_changes_no_bit(
    seeing_models: Path, tmp_path: Path, name: str
) -> None:
    source = seeing_models / name
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", None, 10**9)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(ValueError, match=f"NeMo 2 has no model for '{name.removesuffix('_tied')}'"):
        to_nemo(source, tmp_path / "nemo")
