"""The files of a model are read once by all ranks together, and every rank has what it would have
read itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.checkpoints import directory, safe_load
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.policy.state import weights
from megatron_rl.types import Shard
from tests.ranks import on_ranks
from tests.zoo import save_tiny_model, tiny_policy

MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen3_moe"):
        save_tiny_model(family, folder / family)
    return folder


@contextmanager
def bytes_read() -> Iterator[dict[str, int]]:
    """Bytes of each tensor that this process takes out of files meanwhile."""
    read: dict[str, int] = {}
    real = HfDirectory.read_shard

    def counting(self: HfDirectory, shard: Shard) -> torch.Tensor:
        values = real(self, shard)
        read[shard.name] = read.get(shard.name, 0) + values.numel() * values.element_size()
        return values

    HfDirectory.read_shard = counting  # type: ignore[method-assign]
    try:
        yield read
    finally:
        HfDirectory.read_shard = real  # type: ignore[method-assign]


def of_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@on_ranks(4)
@pytest.mark.parametrize(
    ("model", "layout", "most"),
    [
        ("qwen2", {}, 1.0),
        ("qwen2", {"tensor": 2}, 1.05),  # norms are read by every tensor rank
        ("qwen2", {"pipeline": 2}, 1.0),
        ("qwen2", {"context": 2}, 1.0),
        ("qwen3_moe", {"expert": 2}, 1.0),
    ],
)
def test_all_ranks_read_one_model(models, model, layout, most):
    """``most``: bytes that are read by all ranks, in whole models."""
    path = models / model
    with bytes_read() as read:
        policy = tiny_policy(path, layout)
    size = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (HfDirectory(path).read(name) for name in HfDirectory(path).files)
    )
    total = sum(sum(of_rank.values()) for of_rank in of_all_ranks(read))
    assert total <= most * size, f"{total / size:.3f} models were read"
    assert total >= size, "all of it"
    got = [item.tensor.detach().clone() for item in policy.held]
    with torch.no_grad():
        for item in policy.held:
            item.tensor.fill_(float("nan"))
    weights.load(policy.held, policy.arch, path)  # every rank for itself
    for item, values in zip(policy.held, got, strict=True):
        assert torch.equal(item.tensor, values), item.name


@on_ranks(2)
@pytest.mark.parametrize("read_weights", [True, False])
def test_a_damaged_model_is_an_error_of_all_ranks(models, tmp_path, read_weights):
    """Only the first rank reads it; a policy that reads no weights looks at it, too."""
    broken = tmp_path / "broken"
    if dist.get_rank() == 0:
        broken.mkdir()
        for file in (models / "qwen2").iterdir():
            (broken / file.name).write_bytes(file.read_bytes())
        content = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    dist.barrier()
    with pytest.raises(ValueError, match="damaged or cut off"):
        tiny_policy(broken, {}, read_weights=read_weights)


@contextmanager
def calls(module: Any, name: str) -> Iterator[list[Path]]:
    """What the function ``name`` is called with in this process meanwhile."""
    seen: list[Path] = []
    real = getattr(module, name)

    def counting(path: Path) -> Any:
        seen.append(path)
        return real(path)

    setattr(module, name, counting)
    try:
        yield seen
    finally:
        setattr(module, name, real)


@on_ranks(2)
def test_the_files_of_a_checkpoint_are_looked_at_by_one_rank_and_its_index_read_once(
    models, tmp_path
):
    """On a shared disk every look at a file is a question to its server."""
    policy = tiny_policy(models / "qwen2", {})
    policy.save(tmp_path / "step_000001", {})
    with calls(directory, "check") as checks, calls(safe_load, "read_index") as indexes:
        policy.load(tmp_path / "step_000001")
    assert of_all_ranks(len(checks)) == [1, 0]
    assert of_all_ranks(len(indexes)) == [1, 1]


def state(policy: Any) -> list[torch.Tensor]:
    """Weights, the reference's weights and those of the optimizer."""
    found = [item.tensor.detach().float() for item in policy.held]
    found += [values.float() for _, values in sorted(policy.reference.tensors().items())]
    for part in policy.optimizer.chained_optimizers:
        found += [
            values.detach().float().flatten()
            for group in part.optimizer.param_groups
            for parameter in group["params"]
            for values in (parameter, *map(part.optimizer.state[parameter].get, MOMENTS))
        ]
    return [values.clone() for values in found]


@on_ranks(2)
@pytest.mark.parametrize(
    ("model", "saved", "other"),
    [
        ("qwen2", {"tensor": 2}, {"tensor": 2}),
        pytest.param("qwen2", {}, {"pipeline": 2}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"pipeline": 2}, {"expert": 2}, marks=pytest.mark.full),
    ],
)
def test_a_policy_that_resumes_reads_no_model(models, tmp_path, model, saved, other):
    """A policy that reads nothing of the model has all bits of one that does, and of the reference,
    which is no longer what is trained."""
    path, checkpoint = models / model, tmp_path / "step_000001"
    layout = {"distributed_optimizer": True}
    params = "bfloat16"
    policy = tiny_policy(path, saved | layout, params)
    with torch.no_grad():
        for item in policy.held:
            item.tensor.add_(torch.ones_like(item.tensor))
        policy.optimizer.reload_model_params()
    policy.save(checkpoint, {})
    policy.close()
    plain = tiny_policy(path, other | layout, params)
    plain.load(checkpoint)
    wanted = state(plain)
    plain.close()
    with bytes_read() as read:
        resumed = tiny_policy(path, other | layout, params, read_weights=False)
        with torch.no_grad():
            for item in resumed.held:
                item.tensor.fill_(float("nan"))  # whatever was in that memory
            resumed.reference.assign(
                dict.fromkeys(resumed.reference.names, torch.tensor(torch.nan))
            )
        resumed.optimizer.reload_model_params()
        resumed.load(checkpoint)
    assert of_all_ranks(read) == [{}] * dist.get_world_size()
    got = state(resumed)
    assert all(values.isfinite().all() for values in got)
    assert all(map(torch.equal, got, wanted)) and len(got) == len(wanted)
    starting = resumed.reference.tensors()
    apart = [
        (item.tensor.float() - starting[item.chunk, item.name].float()).abs().min()
        for item in resumed.held
        if "word_embeddings" not in item.name and "output_layer" not in item.name
    ]
    assert min(apart) > 0.5, "the reference has the weights of the start"


@on_ranks(2)
def test_a_policy_that_reads_no_model_refuses_another_checkpoint(models, tmp_path):
    dense = tiny_policy(models / "qwen2", {})
    dense.save(tmp_path / "step_000001", {})
    dense.close()
    policy = tiny_policy(models / "qwen3_moe", {}, read_weights=False)
    with pytest.raises(ValueError, match="does not fit this run: the model's family"):
        policy.load(tmp_path / "step_000001")
    policy.close()
