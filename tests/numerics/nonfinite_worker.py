"""torchrun program (2 processes), many layouts: losses, gradients and weights that are not finite, and model directories with NaN.

Arguments: a folder, which gets the models, twice (the worker of the resume test, imported here, reads the second). Prints one line
``OK <case>`` for each case.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.errors import NonFiniteError
from megatron_rl.policy import checkpoint
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import create_state
from megatron_rl.policy.safe_load import load_plain
from megatron_rl.runtime import checkpoint_dir
from megatron_rl.types import LossOutput, SequenceBatch, TokenView
from tests.numerics import models
from tests.numerics.checkpoint_worker import record
from tests.numerics.policy_reference import make_batch
from tests.numerics.policy_worker import build

FOLDER = Path(sys.argv[1])
SHARDED: dict[str, Any] = dict(distributed_optimizer=True)
LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp2": ("llama", dict(tensor=2), "float32"),
    "dp2": ("llama", {}, "float32"),
    "dp2_sharded": ("llama", SHARDED, "float32"),
    "dp2_sharded_bf16": ("llama", SHARDED, "bfloat16"),
    "dp2_overlap": ("llama", {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}, "bfloat16"),
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
    """The value of ``value``, with a gradient of NaN at the tokens of the last response: those of one rank."""
    last = view.index >= make_batch().response_offsets[-2]
    distance = torch.where(last, view.logprobs - view.logprobs.detach(), torch.zeros_like(view.logprobs))
    return value + (distance.square().sum().sqrt() if bool(last.any()) else 0.0)


def infinite_gradient(value: Tensor, view: TokenView) -> Tensor:
    return value + (view.logprobs - view.logprobs.detach()).sum() * 3e38


def update(policy: MegatronPolicy, shape: Shape) -> Any:
    batch: SequenceBatch = make_batch()

    def loss(view: TokenView) -> LossOutput:
        value = -(view.logprobs * torch.cos(view.index.float())).mean()
        return LossOutput(shape(value, view), {})

    rows = list(range(batch.num_responses))[policy.data_parallel_rank :: policy.data_parallel_size]
    return policy.update(batch, [rows[:1], rows[1:]], loss)


def check_skips(policy: MegatronPolicy, name: str) -> None:
    """Whatever is not finite, weights and moments stay, bit for bit, on both ranks; a good step goes on from there."""
    assert not update(policy, good).skipped
    before = record(policy)
    for shape in (nan_value, nan_gradient, infinite_gradient):
        result = update(policy, shape)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (result.skipped, str(result.loss), str(result.grad_norm)))
        assert result.skipped and everyone[0] == everyone[1], f"{name} {shape.__name__}: {everyone}"
        after = record(policy)
        # The rate of a group is that of the schedule, which goes on.
        same = [a.dtype == torch.float64 or torch.equal(a, b) for a, b in zip(before, after, strict=True)]
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
    try:
        policy.check_weights(7)
    except NonFiniteError as error:
        said = str(error)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (said, chosen.parameter.names))
    assert everyone[0][0] == everyone[1][0] and said.startswith("step 7: weights of "), said
    assert all(tensor in said for tensor in everyone[1][1]), (said, everyone)


def run(name: str, clip_grad: float) -> None:
    model, layout, params = LAYOUTS[name]
    policy = build(FOLDER / model, layout, params)
    policy.optim = policy.optim.model_copy(update={"clip_grad": clip_grad})
    create_state(policy.optimizer)
    check_skips(policy, name)
    if not policy.parallel.overlap_param_gather:  # the gathering would overwrite the value
        check_poisoned(policy, name)
    policy.close()
    if dist.get_rank() == 0:
        print(f"OK {name} {clip_grad}", flush=True)


def check_load() -> None:
    """A row that rank 1 alone reads is NaN: both ranks refuse, with one message."""
    path = FOLDER / "poisoned"
    if dist.get_rank() == 0:
        shutil.copytree(FOLDER / "llama", path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.layers.2.self_attn.o_proj.weight"][:, -1] = float("nan")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    try:
        build(path, dict(tensor=2))
    except ValueError as error:
        said = str(error)
    assert "not finite: model.layers.2.self_attn.o_proj.weight (64 values)" in said, said
    if dist.get_rank() == 0:
        print("OK load", flush=True)


def check_whole_gradients() -> None:
    """The gradients by name are those of the plain optimizer, also where a distributed one holds a share on each rank."""
    found = []
    for name in ("dp2", "dp2_sharded"):
        policy = build(FOLDER / "llama", LAYOUTS[name][1])
        update(policy, good)
        found.append({tensor: value.clone() for tensor, value in policy.gathered_gradients()})
        policy.close()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][tensor], found[1][tensor]) for tensor in found[0])
    if dist.get_rank() == 0:
        print("OK gradients", flush=True)


class Program:
    """Unpickled with any name allowed, it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (FOLDER / "ran",)


def poisoned(source: Path, name: str) -> Path:
    """A copy of the checkpoint whose file ``name`` runs a program when it is unpickled, with a manifest that fits it."""
    path = FOLDER / "poisoned_checkpoint"
    dist.barrier()  # all ranks have done with the one before
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        partial = checkpoint_dir.begin(path)
        shutil.copytree(source, partial, dirs_exist_ok=True)
        if name == ".metadata":
            (partial / name).write_bytes(pickle.dumps(Program()))
        else:
            torch.save({"optimizer_steps": Program()}, partial / name)
        info = checkpoint_dir.check(source)
        (partial / checkpoint_dir.MANIFEST).unlink()
        checkpoint_dir.finish(path, info)
    dist.barrier()
    return path


def check_programs() -> None:
    """A checkpoint with a program in it is refused by file and name; the objects among the shards pass a look, too."""
    policy = build(FOLDER / "llama", dict(tensor=2))
    source = FOLDER / "saved"
    policy.save(source, {"step": 1})
    for name in (".metadata", "common.pt", "extra.pt"):
        path = poisoned(source, name)
        try:
            policy.load(path)
        except ValueError as error:
            said = str(error)
        assert said.startswith(f"{path / name} ") and "it could run any program and was not read" in said, said
        assert not (FOLDER / "ran").exists()
    looked_at = []
    with mock.patch.object(checkpoint.safe_load, "load_plain", lambda *args: looked_at.append(args[1]) or load_plain(*args)):
        assert policy.load(source) == {"step": 1}
    assert any("_extra_state" in name for name in looked_at), looked_at
    policy.close()
    if dist.get_rank() == 0:
        print("OK programs", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for name in ("llama", "qwen2_tied", "qwen3_moe"):
            models.save(name, FOLDER / name)
    dist.barrier()
    for name in LAYOUTS:
        run(name, 1.0)
    run("tp2", 0.0)
    run("dp2_sharded", 0.0)
    check_whole_gradients()
    check_programs()
    check_load()


if __name__ == "__main__":
    main()
