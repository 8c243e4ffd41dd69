"""The load of experts in an update, in every layout, against a count of what transformers' routers
choose (float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.passes import LocalBatch
from megatron_rl.policy.passes.expert_load import load_metrics
from tests import zoo
from tests.numerics.policy_reference import ClippedLoss, make_batch, sequences
from tests.numerics.policy_worker import splits
from tests.ranks import call

K = 2
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
        found.append(policy._routing.load())
    metrics = policy.update(LocalBatch(batch, cut), loss).metrics
    found.append({key: value for key, value in metrics.items() if "expert" in key})
    policy.close()
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
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
