"""Losses, gradients and weights that are not finite, in real megatron optimizers of every kind, on
two ranks; checkpoints and model directories that must not be read."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.checkpoints import directory, part_reader
from megatron_rl.checkpoints.safe_load import load_plain
from megatron_rl.errors import NonFiniteError
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import create_state
from megatron_rl.types import SequenceBatch
from tests.numerics.policy_reference import make_batch
from tests.numerics.policy_state import record
from tests.ranks import on_ranks
from tests.unit.checkpoints.test_safe_load import Program
from tests.zoo import tiny_policy
from tools.replay.gradients import gathered_gradients

SHARDED: dict[str, Any] = dict(distributed_optimizer=True)
LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp2": ("llama", dict(tensor=2), "float32"),
    "dp2": ("llama", {}, "float32"),
    "dp2_sharded": ("llama", SHARDED, "float32"),
    "dp2_sharded_bf16": ("llama", SHARDED, "bfloat16"),
    "dp2_overlap": (
        "llama",
        {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "bfloat16",
    ),
    "pp2": ("qwen2_tied", dict(pipeline=2), "float32"),
    "ep2": ("qwen3_moe", dict(expert=2, **SHARDED), "float32"),
}

Shape = Callable[[Tensor, TokenView], Tensor]


def good(value: Tensor, view: TokenView) -> Tensor:
    return value


def nan_value(value: Tensor, view: TokenView) -> Tensor:
    """NaN, while the gradient is that of ``value``."""
    return value + torch.tensor(float("nan"))


def nan_gradient(value: Tensor, view: TokenView) -> Tensor:
    """The value of ``value``, with a gradient of NaN at the tokens of the last response: those of
    one rank."""
    last = view.index >= make_batch().response_offsets[-2]
    distance = torch.where(
        last, view.logprobs - view.logprobs.detach(), torch.zeros_like(view.logprobs)
    )
    return value + (distance.square().sum().sqrt() if bool(last.any()) else 0.0)


def infinite_gradient(value: Tensor, view: TokenView) -> Tensor:
    return value + (view.logprobs - view.logprobs.detach()).sum() * 3e38


def update(policy: MegatronPolicy, shape: Shape) -> Any:
    batch: SequenceBatch = make_batch()

    def loss(view: TokenView) -> LossOutput:
        value = -(view.logprobs * torch.cos(view.index.float())).mean()
        return LossOutput(shape(value, view), {})

    rows = list(range(batch.num_responses))[policy.ranks.data_rank :: policy.ranks.data]
    return policy.update(LocalBatch(batch, [rows[:1], rows[1:]]), loss)


def check_skips(policy: MegatronPolicy, name: str) -> None:
    """Whatever is not finite, weights and moments stay, bit for bit, on both ranks; a good step
    goes on from there."""
    assert not update(policy, good).skipped
    before = record(policy)
    for shape in (nan_value, nan_gradient, infinite_gradient):
        result = update(policy, shape)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (result.skipped, str(result.loss), str(result.grad_norm)))
        assert result.skipped and everyone[0] == everyone[1], f"{name} {shape.__name__}: {everyone}"
        after = record(policy)
        # The rate of a group is that of the schedule, which goes on.
        same = [
            a.dtype == torch.float64 or torch.equal(a, b)
            for a, b in zip(before, after, strict=True)
        ]
        assert all(same), f"{name} {shape.__name__}: {same.count(False)} tensors changed"
    result = update(policy, good)
    assert not result.skipped and result.grad_norm == result.grad_norm
    policy.check_weights(4)


def check_poisoned(policy: MegatronPolicy, name: str) -> None:
    """One value on one rank, and both ranks say which tensor."""
    chosen = [item for item in policy.held if "mlp" in item.name][-1]
    if dist.get_rank() == 1:
        with torch.no_grad():
            chosen.tensor.view(-1)[-1] = float("inf")
    with pytest.raises(NonFiniteError) as raised:
        policy.check_weights(7)
    said = str(raised.value)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (said, chosen.parameter.names))
    assert everyone[0][0] == everyone[1][0] and said.startswith("step 7: weights of "), said
    assert all(tensor in said for tensor in everyone[1][1]), (said, everyone)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "clip_grad"), [*((name, 1.0) for name in LAYOUTS), ("tp2", 0.0), ("dp2_sharded", 0.0)]
)
def test_steps_are_skipped_on_all_ranks_and_bad_weights_are_named(
    hf_models: Path, name: str, clip_grad: float
):
    model, layout, params = LAYOUTS[name]
    policy = tiny_policy(hf_models / model, layout, params)
    policy.optim = policy.optim.model_copy(update={"clip_grad": clip_grad})
    create_state(policy.optimizer)
    check_skips(policy, name)
    if not policy.parallel.overlap_param_gather:  # the gathering would overwrite the value
        check_poisoned(policy, name)


@on_ranks(2)
def test_a_row_that_one_rank_reads_is_refused_by_both(hf_models: Path, tmp_path: Path):
    path = tmp_path / "poisoned"
    if dist.get_rank() == 0:
        shutil.copytree(hf_models / "llama", path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.layers.2.self_attn.o_proj.weight"][:, -1] = float("nan")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    name = r"model\.layers\.2\.self_attn\.o_proj\.weight"
    with pytest.raises(ValueError, match=rf"not finite: {name} \(64 values\)"):
        tiny_policy(path, dict(tensor=2))


@on_ranks(2)
def test_gradients_by_name_are_whole(hf_models: Path):
    """Those of the plain optimizer, also where a distributed one holds a share on each rank."""
    gradients = []
    for name in ("dp2", "dp2_sharded"):
        policy = tiny_policy(hf_models / "llama", LAYOUTS[name][1])
        update(policy, good)
        gradients.append({tensor: value.clone() for tensor, value in gathered_gradients(policy)})
        policy.close()
    plain, sharded = gradients
    assert plain.keys() == sharded.keys()
    assert all(torch.equal(plain[tensor], sharded[tensor]) for tensor in plain)


def poisoned(source: Path, name: str, program: Program) -> Path:
    """A copy of the checkpoint whose file ``name`` runs a program when it is unpickled, with a
    manifest that fits it."""
    path = source.with_name("poisoned_checkpoint")
    dist.barrier()  # all ranks have done with the one before
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        partial = directory.begin(path)
        shutil.copytree(source, partial, dirs_exist_ok=True)
        if name == ".metadata":
            (partial / name).write_bytes(pickle.dumps(program))
        else:
            torch.save({"optimizer_steps": program}, partial / name)
        info = directory.check(source)
        (partial / directory.MANIFEST).unlink()
        directory.finish(path, info)
    dist.barrier()
    return path


@on_ranks(2)
def test_a_checkpoint_with_a_program_in_it_is_not_read(hf_models: Path, tmp_path: Path):
    """It is refused by file and name; the objects among the shards pass a look, too."""
    policy = tiny_policy(hf_models / "llama", dict(tensor=2))
    source, proof = tmp_path / "saved", tmp_path / "ran"
    policy.save(source, {"step": 1})
    for name in (".metadata", "common.pt", "extra.pt"):
        path = poisoned(source, name, Program(proof))
        with pytest.raises(ValueError, match="it could run any program and was not read") as raised:
            policy.load(path)
        assert str(raised.value).startswith(f"{path / name} ")
        assert not proof.exists()
    looked_at = []

    def look(*args: Any) -> Any:
        looked_at.append(args[1])
        return load_plain(*args)

    with mock.patch.object(part_reader, "load_plain", look):
        assert policy.load(source) == {"step": 1}
    assert any("_extra_state" in name for name in looked_at), looked_at
