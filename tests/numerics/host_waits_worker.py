"""torchrun program (1 process): where the host would wait for the device in passes and updates of 2 and 4 layers.

Arguments: a folder for the models, the file for the figures (JSON).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megatron_rl.loss import Credit, load_method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.trainer.objective import MinibatchLoss, Scored, on_cpu
from megatron_rl.trainer.rollouts import Experience
from megatron_rl.types import SequenceBatch, TokenScores
from tests.numerics import models
from tests.numerics.policy_reference import NUM_ROWS, make_batch
from tests.numerics.policy_worker import build
from tests.numerics.simulated_device import SimulatedDevice

# megatron's rotary embedding without Transformer Engine reads the boundaries of the sequences.
VENDOR = ("_apply_rotary_pos_emb_thd",)
SPLITS = {2: [[0, 1, 2], [3, 4, 5]], 4: [[0, 1], [2], [3, 4], [5]]}


def fused_rotary(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    """Stands in for Transformer Engine's kernel, which starts every sequence at position 0."""
    assert cp_size == 1
    place = torch.arange(t.shape[0], dtype=cu_seqlens.dtype, device=torch.device("cpu"))
    sequence = torch.searchsorted(cu_seqlens, place, right=True) - 1
    angles = freqs[:, 0].index_select(0, place - cu_seqlens[sequence])
    half = torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], dim=-1)
    return t * angles.cos() + half * angles.sin()


def scored(batch: SequenceBatch) -> tuple[Scored, Credit]:
    draw = torch.Generator().manual_seed(5)
    old, ref, sampler = torch.rand(3, int(batch.response_lengths.sum()), generator=draw).neg().unbind()
    rewards = torch.rand(NUM_ROWS, generator=draw)
    experience = Experience(
        responses=(), sequences=batch, group_ids=torch.arange(NUM_ROWS) // 3, rewards=rewards, correct=rewards > 0.5,
        truncated=torch.zeros(NUM_ROWS, dtype=torch.bool), sampler_logprobs=sampler, discarded_groups=0, tries=1,
    )  # fmt: skip
    credit = Credit(torch.randn(NUM_ROWS, generator=draw), torch.ones(NUM_ROWS), rewards >= 0, {})
    return Scored(experience, TokenScores(old, None), TokenScores(ref, None)), credit


def counted(device: SimulatedDevice, action: Callable[[], Any]) -> dict[str, dict[str, int]]:
    device.clear()
    action()
    return {"waits": dict(device.waits), "queued": dict(device.queued), "vendor": dict(device.vendor)}


def trips(policy: MegatronPolicy, fused: bool) -> dict[str, Any]:
    """For 2 and 4 micro-batches, as a step of training calls the policy."""
    batch = replace(make_batch(), prompt_ids=None)
    evidence, credit = scored(batch)
    method = load_method("grpo", ["mismatch.kind=tis", "entropy.coef=0.01"])
    device = SimulatedDevice(VENDOR)
    for tensors in (policy._weight_tensors(), policy._gradient_tensors(), policy._optimizer_tensors()):
        for tensor in tensors:
            if tensor.dim():
                device.put(tensor)

    def logprobs(split: list[list[int]]) -> TokenScores:
        return on_cpu(policy.logprobs(batch, split, entropy=True))

    def update(split: list[list[int]]) -> None:
        loss = MinibatchLoss(method, evidence, credit, range(NUM_ROWS))
        result = policy.update(batch, split, loss, entropy="grad", scores=True)
        assert result.scores is not None
        on_cpu(result.scores)

    policy.config.apply_rope_fusion = fused
    figures: dict[str, Any] = {}
    with mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", fused_rotary), device.watched():
        figures["first"] = logprobs(SPLITS[2]).logprobs.tolist()
        update(SPLITS[2])  # tables and moments are made
        for number, split in SPLITS.items():
            for action in (logprobs, update):
                figures[f"{action.__name__} {number}"] = counted(device, lambda action=action, split=split: action(split))
    return figures


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures: dict[str, Any] = {}
    for layers in (2, 4):
        path = models.save("qwen2", folder / f"qwen2-{layers}", layers=layers)
        for fused in (False, True):
            policy = build(path, {}, keep_reference=False)
            figures[f"{layers} {'fused' if fused else 'plain'}"] = trips(policy, fused)
            policy.close()
    out.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
