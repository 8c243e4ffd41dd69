"""A policy with adapters of one layout against transformers with adapters written by hand: what
every rank runs, and the plain answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.checkpoints import adapter_checkpoint, peft_format
from megatron_rl.models import read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.passes import LocalBatch
from megatron_rl.policy.adapters import random_a
from megatron_rl.policy.megatron_policy import MegatronPolicy
from tests import zoo
from tests.numerics import policy_worker
from tests.numerics.policy_reference import (
    ENTROPY,
    relative_error,
)
from tests.numerics.policy_worker import OPTIM, logits_error, splits
from tests.numerics.seeing import published_name, seeing_differentiated
from tools.replay.gradients import gathered_gradients
from tools.replay.recorded_run import ReplayedRun

PROJECTIONS = {
    "attention": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "out_proj",
    ),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
LORA: dict[str, Any] = dict(rank=4, alpha=6.0)


@dataclass(frozen=True)
class Case:
    name: str
    processes: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    lora: dict[str, Any] = field(default_factory=dict)


class AdaptedLinear(torch.nn.Module):
    """The definition: W x + b + scale B A x."""

    def __init__(self, base: torch.nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.Parameter(b)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def adapted(model: str, lora: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, AdaptedLinear]]:
    """transformers' model with adapters that change much, and these by the name of their linear."""
    hf = zoo.tiny_model(model).requires_grad_(False)
    targets = lora.get("targets", ("attention", "mlp"))
    names = [name for target in targets for name in PROJECTIONS[target]]
    rank = lora["rank"]
    scale = lora["alpha"] / (rank**0.5 if lora.get("rslora") else rank)
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, linear in list(hf.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in names and "visual" not in name:
            name = published_name(name, model)
            a = random_a(name, (rank, linear.in_features))
            b = 0.1 * torch.randn(linear.out_features, rank, generator=generator)
            found[name] = AdaptedLinear(linear, a, b, scale)
            setattr(hf.get_submodule(owner), last, found[name])
    return hf, found


def differentiated(model: str) -> Callable[[Any], dict[str, Any]]:
    """What gives logits, scores and loss of such a model, and its parameters their gradients."""
    return seeing_differentiated if model in zoo.SEEING else policy_worker.differentiated


def by_hf_name(adapters: dict[str, AdaptedLinear], what: Any = lambda p: p) -> dict[str, Tensor]:
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"{name}.lora_A.weight"] = what(adapter.a).detach().clone()
        tensors[f"{name}.lora_B.weight"] = what(adapter.b).detach().clone()
    return tensors


def reference(case: Case, path: Path, folder: Path) -> dict[str, Any]:
    """What transformers says: scores, loss, gradients, one step of Adam. Leaves the adapters in
    ``folder``, in peft's format."""
    lora = LORA | case.lora
    arch, _ = read_architecture(path)
    hf, adapters = adapted(case.model, lora)
    start = by_hf_name(adapters)
    model = zoo.model_config(path, lora=lora)
    peft_format.write(start, with_adapters(arch, model.lora), model, folder)
    found = differentiated(case.model)(hf)
    grads = by_hf_name(adapters, lambda parameter: parameter.grad)
    base = differentiated(case.model)(zoo.tiny_model(case.model))
    settings = dict(lr=OPTIM.learning_rate, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, weight_decay=OPTIM.weight_decay, **settings).step()
    after = by_hf_name(adapters)
    merged = {
        f"{name}.weight": adapter.base.weight + adapter.scale * adapter.b @ adapter.a
        for name, adapter in adapters.items()
    }
    return found | dict(
        base_logprobs=base["logprobs"],
        start=start,
        gradients=grads,
        moved={name: after[name] - start[name] for name in start},
        merged={name: value.detach() for name, value in merged.items()},
    )


def compare(case: Case, path: Path, folder: Path, wanted: dict[str, Any]) -> dict[str, float]:
    """Distances between the policy and ``wanted``, which is what ``reference`` returned."""
    lora = LORA | case.lora | {"path": str(folder)}
    policy = zoo.tiny_policy(path, case.layout, lora=lora, **wanted.get("settings", {}))
    batch = wanted["batch"]
    figures: dict[str, float] = {"logits": logits_error(policy, wanted)}
    base = [item.tensor.detach().clone() for item in policy.view.frozen]
    for name, split in splits(policy).items():
        work = LocalBatch(batch, split)
        got = zoo.of_all_rows(policy.score(work, ENTROPY)).logprobs
        figures[f"logprobs_{name}"] = float((got - wanted["logprobs"]).abs().max())
        reference = zoo.of_all_rows(policy.score(work, reference=True)).logprobs
        figures[f"off_{name}"] = float((reference - wanted["base_logprobs"]).abs().max())
        totals = policy.backward(work, wanted["loss"], ENTROPY)
        figures[f"loss_{name}"] = abs(totals.loss - wanted["value"]) / abs(wanted["value"])
        found = dict(gathered_gradients(policy))
        for part in ("lora_A", "lora_B"):
            figures[f"gradients_{part}_{name}"] = relative_error(
                {key: value for key, value in found.items() if part in key},
                {key: value for key, value in wanted["gradients"].items() if part in key},
            )
    result = policy.update(LocalBatch(batch, splits(policy)["uneven"]), wanted["loss"], ENTROPY)
    norm = sum(float(g.square().sum()) for g in wanted["gradients"].values()) ** 0.5
    figures["norm"] = abs(result.grad_norm - norm) / norm
    policy.wait_for_param_gather()
    after = dict(policy.view.gathered_adapters())
    moved = {name: after[name] - wanted["start"][name] for name in after}
    figures["update"] = relative_error(moved, wanted["moved"])
    figures |= published(policy, path, wanted)
    figures["base_moved"] = float(
        not all(
            torch.equal(item.tensor, before)
            for item, before in zip(policy.view.frozen, base, strict=True)
        )
    )
    policy.close()
    return figures


def published(policy: MegatronPolicy, path: Path, wanted: dict[str, Any]) -> dict[str, float]:
    """What engines get by either way of the weight sync, after the update."""
    stored = load_file(path / "model.safetensors")
    whole = dict(policy.gathered_weights())
    assert set(whole) == set(stored)
    expected = {name: wanted["merged"].get(name, value) for name, value in stored.items()}
    shards_differ = 0.0
    for shard in policy.weight_shards():
        mine = policy.weight(shard.key)
        offset = mine.storage_offset() + shard.offset
        part = mine.as_strided(shard.shape, shard.stride, offset)
        ends = zip(shard.start, shard.shape, strict=True)
        same = torch.equal(part, whole[shard.name][tuple(slice(a, a + n) for a, n in ends)])
        shards_differ = max(shards_differ, float(not same))
    return {"merged": relative_error(whole, expected), "shards_differ": shards_differ}


def other_base(path: Path, other: Path, folder: Path, lora: dict[str, Any]) -> None:
    """A checkpoint of adapters holds these alone, does not go beside other weights, is read merged
    with its own, and is what a replayed run compares its weights with."""
    policy = zoo.tiny_policy(path, {}, lora=lora)
    for item in policy.held:
        if item.tensor.requires_grad:  # an adapter; B is zero at the start
            item.tensor.data.normal_(std=0.1)
    policy.save(folder, {})
    policy.load(folder)
    policy.export(folder.parent / "export")
    stored = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert stored < 4 * sum(item.tensor.numel() for item in policy.held), "weights are in there"
    again = object.__new__(ReplayedRun)
    again.policy = policy
    again._route = SimpleNamespace(run=folder.parents[1])
    again._config = SimpleNamespace(model=SimpleNamespace(path=path))
    again._world = SimpleNamespace(is_main=True, from_main=lambda ask: ask())
    assert again._different_weights(1) == []
    policy.held[-1].tensor.data.add_(1.0)
    assert again._different_weights(1) != []
    policy.close()
    arch, _ = read_architecture(path)
    merged = dict(adapter_checkpoint.read_hf(folder, path, arch, lambda _: None))
    exported = load_file(folder.parent / "export" / "model.safetensors")
    assert merged.keys() == exported.keys()
    assert all(torch.equal(merged[name], exported[name]) for name in merged)
    output = next(name for name in merged if name.endswith(("o_proj.weight", "out_proj.weight")))
    assert not torch.equal(merged[output], load_file(path / "model.safetensors")[output])
    with pytest.raises(ValueError, match="trained beside other weights than those of"):
        list(adapter_checkpoint.read_hf(folder, other, arch, lambda _: None))
    policy = zoo.tiny_policy(other, {}, lora=lora)
    with pytest.raises(ValueError, match=r"digest of the base is '[0-9a-f]+' there and '[0-9a-f]"):
        policy.load(folder)
    policy.close()
