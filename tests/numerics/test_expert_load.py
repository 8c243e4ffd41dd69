"""The load of experts in an update, the losses of routers and the steps of their biases, in every
layout, against counts and autograd of transformers (float32)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.models import read_architecture
from megatron_rl.models.experts import router_problems
from megatron_rl.passes import LocalBatch, LossOutput
from megatron_rl.policy.passes.expert_load import ExpertLoad, bias_step, load_metrics
from tests import zoo
from tests.numerics.policy_cases import optim
from tests.numerics.policy_reference import (
    ClippedLoss,
    gradients,
    make_batch,
    relative_error,
    scores,
    sequences,
)
from tests.numerics.policy_worker import splits
from tests.ranks import call, on_ranks
from tools.replay.gradients import gathered_gradients

K = 2
AUX, Z, RATE = 0.3, 0.2, 0.05
BIAS = "e_score_correction_bias"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "prompts shared": (1, dict(share_prompts=True)),
    "prompts repeated": (1, dict(share_prompts=False)),
    "tensor": (2, dict(tensor=2, sequence=True)),
    "expert": (2, dict(expert=2)),
    "data": (2, {}),
    "context": (2, dict(context=2)),
    "pipeline, full": (2, dict(pipeline=2, recompute="full")),
}
MODELS = ("qwen3_moe", "glm4_moe")  # softmax; first layer dense, sigmoids and a bias
CORE = ("tensor", "expert")  # of the core tier
EACH = [
    pytest.param(
        name,
        model,
        id=f"{name}-{model}",
        marks=() if name in CORE else pytest.mark.full,
    )
    for name in LAYOUTS
    for model in MODELS
]


def routed(model: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(logits of a layer's router, chosen experts), of the response tokens of the batch."""
    batch = make_batch()
    found: list[list[Tensor]] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]

    def keep(output: Any) -> None:
        found[-1].append(output[0] if isinstance(output, tuple) else output)

    handles = [gate.register_forward_hook(lambda _, __, output: keep(output)) for gate in gates]
    for tokens in sequences(batch):
        found.append([])
        model(tokens[None])
    for handle in handles:
        handle.remove()
    layers = []
    for layer, gate in enumerate(gates):
        logits = torch.cat(
            [of[layer][first:] for of, first in zip(found, batch.prompt_lengths, strict=True)]
        )
        bias = getattr(gate, "e_score_correction_bias", None)
        scores = logits if bias is None else logits.sigmoid() + bias
        layers.append((logits, scores.topk(K).indices))
    return layers


def loads(model: torch.nn.Module) -> list[list[int]]:
    return [
        [int((chosen == expert).sum()) for expert in range(logits.shape[1])]
        for logits, chosen in routed(model)
    ]


def updates(path: Path, layout: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of each cut of the batch into micro-batches, before a weight has moved."""
    batch = make_batch()
    share = layout.pop("share_prompts", True)
    found = []
    policy = zoo.tiny_policy(path, layout, share_prompts=share)
    loss = ClippedLoss(batch, torch.zeros(int(batch.response_lengths.sum())))
    for cut in splits(policy).values():
        policy.backward(LocalBatch(batch, cut), loss)
        policy.score(LocalBatch(batch, cut))  # is not counted
        found.append(policy._routing.end_update(skipped=True))
    metrics = policy.update(LocalBatch(batch, cut), loss).metrics
    found.append({key: value for key, value in metrics.items() if "expert" in key})
    policy.close()
    return found


@pytest.mark.parametrize(("name", "model"), EACH)
def test_the_load_is_a_count_of_the_routers_choices(name: str, model: str, hf_models: Path) -> None:
    wanted = loads(zoo.tiny_model(model))
    assert len({tuple(of) for of in wanted}) == len(wanted), "layers differ"
    uneven = [max(of) * len(of) / sum(of) for of in wanted]
    unused = [count == 0 for of in wanted for count in of]
    processes, layout = LAYOUTS[name]
    for found in call(processes, updates, hf_models / model, {**layout}, timeout=200):
        for metrics in found:
            assert metrics == {
                "policy/expert_load_max_over_mean": pytest.approx(sum(uneven) / len(uneven)),
                "policy/expert_load_worst_layer_max": pytest.approx(max(uneven)),
                "policy/expert_unused_share": pytest.approx(sum(unused) / len(unused)),
            }


def test_hand_worked_load() -> None:
    load = torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    assert list(load_metrics(load).values()) == [2.0, 3.0, 0.25]


def router_loss(model: torch.nn.Module, rows: list[slice] | None = None) -> Tensor:
    """Of all layers; ``rows``: of each of these tokens for themselves, and their mean."""
    total = torch.zeros(())
    for logits, chosen in routed(model):
        is_sigmoid = hasattr(model.config, "n_routed_experts")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        parts = rows or [slice(None)]
        for part in parts:
            share = torch.nn.functional.one_hot(chosen[part], logits.shape[1]).float().mean((0, 1))
            even = logits.shape[1] * (share * scores[part].mean(0)).sum()
            total = total + AUX * even / len(parts)
        total = total + Z * torch.logsumexp(logits, -1).square().mean()
    return total


def trained(path: Path, layout: dict[str, Any], base: Tensor, folder: Path) -> dict[str, Any]:
    """Gradients of each cut with losses of routers; biases before and after a step that is
    skipped, one that is not, and a restart from a checkpoint; those of the export."""
    batch = make_batch()
    loss = ClippedLoss(batch, base)
    layout.pop("share_prompts", None)
    biased = path.name != MODELS[0]
    rate = RATE if biased else 0.0
    chosen = optim(router_aux_loss_coef=AUX, router_z_loss_coef=Z, router_bias_rate=rate)
    policy = zoo.tiny_policy(path, layout, optim=chosen, keep_reference=not biased)
    found: dict[str, Any] = {"gradients": [], "biases": []}

    def biases() -> dict[str, Tensor]:
        return {key: each for key, each in policy.gathered_weights() if BIAS in key}

    for cut in splits(policy).values():
        policy.backward(LocalBatch(batch, cut), loss)
        found["gradients"].append(dict(gathered_gradients(policy)))
    found["biases"].append(biases())
    rows = LocalBatch(batch, cut)
    assert policy.update(rows, lambda view: LossOutput(view.logprobs.sum() * torch.nan, {})).skipped
    found["biases"].append(biases())
    assert not policy.update(rows, loss).skipped
    found["biases"].append(biases())
    policy.save(folder / "saved", {})
    policy.export(folder / "export")
    moved = found["biases"][-1]
    for item in policy.held:
        item.tensor.data.zero_()
    policy.load(folder / "saved")
    assert all(torch.equal(moved[key], each) for key, each in biases().items())
    policy.close()
    return found


@pytest.mark.parametrize(
    ("name", "model"), [param for param in EACH if param.values[0] != "prompts repeated"]
)
def test_losses_of_routers_are_of_the_minibatch(
    name: str, model: str, hf_models: Path, tmp_path: Path
) -> None:
    """Whatever the cut into micro-batches; with shares of each sequence the gradient is another."""
    hf, batch = zoo.tiny_model(model), make_batch()
    logprobs = scores(hf, batch)[0]
    loss = ClippedLoss(batch, logprobs)
    every = torch.arange(len(logprobs))
    value = loss.contribution(every, logprobs, None, lambda sums: sums)
    (value + router_loss(hf)).backward()
    wanted = gradients(hf)
    hf.zero_grad()
    rows = [slice(*pair) for pair in pairwise(batch.response_offsets.tolist())]
    value = loss.contribution(every, scores(hf, batch)[0], None, lambda sums: sums)
    (value + router_loss(hf, rows)).backward()
    assert relative_error(gradients(hf), wanted) > 1e-3
    processes, layout = LAYOUTS[name]
    base = logprobs.detach()
    ranks = call(processes, trained, hf_models / model, {**layout}, base, tmp_path, timeout=250)
    steps = [bias_step(torch.tensor(of, dtype=torch.float64), RATE) for of in loads(hf)]
    for found in ranks:
        for got in found["gradients"]:
            assert relative_error(got, wanted) <= 2e-6
        first, skipped, moved = found["biases"]
        assert len(moved) == (len(steps) if model == MODELS[1] else 0)
        for key, step in zip(moved, steps, strict=False):
            assert step.abs().max() == pytest.approx(RATE)
            assert torch.equal(skipped[key], first[key])
            assert torch.equal(moved[key], first[key] + step)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[key], each) for key, each in moved.items())


@on_ranks(1)
def test_hand_worked_steps_and_losses(hf_models: Path) -> None:
    """One counted token of scores 1/2, 1/4, 1/8, 1/8 has chosen experts 0 and 1; its logits have
    log-sum-exp 1."""
    load = torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.equal(bias_step(load, 0.1), torch.tensor([-0.1, 0.0, 0.1, 0.1]))
    arch, _ = read_architecture(hf_models / MODELS[0])
    chosen = optim(router_aux_loss_coef=1.0, router_z_loss_coef=10.0)
    load = ExpertLoad(arch, chosen, torch.device("cpu"))
    counted = torch.tensor([True, False])
    load.add(1, torch.tensor([[0, 1], [2, 3]]), counted)
    load.add(0, torch.tensor([[0, 1], [2, 3]]), counted)
    load.total()
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [9.0, 1.0, 1.0, 1.0]]).log() + 1
    assert load.loss(1, logits, counted).item() == pytest.approx(4 * (0.25 + 0.125) + 10)
    assert router_problems(arch, zoo.model_config(hf_models / MODELS[0]), chosen, True) == []
    found = router_problems(arch, zoo.model_config(Path("m")), optim(router_bias_rate=1), False)
    assert found == [
        "optim.router_bias_rate = 1: routers of family qwen3_moe have no bias; set it to 0"
    ]
