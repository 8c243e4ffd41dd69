"""Where the host would wait for the device in passes and updates of 2 and 4 layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.loss import Credit
from megatron_rl.models.vision import window_attention
from megatron_rl.passes import LocalBatch, TokenScores
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollouts.rows.experience import Experience, Responses
from megatron_rl.signals import signals_of
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from megatron_rl.types import SequenceBatch, Sequences
from tests import zoo
from tests.numerics.policy_reference import ENTROPY, NUM_ROWS, make_batch
from tests.numerics.seeing import seeing_batch, seeing_policy
from tests.numerics.simulated_device import SimulatedDevice
from tests.zoo import tiny_policy
from tools.replay.read_bundle import response_tokens

# megatron's rotary embedding without Transformer Engine reads the boundaries of the sequences.
VENDOR = ("_apply_rotary_pos_emb_thd",)
# transformers' functions of grids, which are of the host.
OF_GRIDS = ("get_vision_window_index", "get_vision_position_ids", "get_vision_cu_seqlens")
SPLITS = {2: [[0, 1, 2], [3, 4, 5]], 4: [[0, 1], [2], [3, 4], [5]]}


def fused_rotary(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int, interleaved: bool
) -> Tensor:
    """Stands in for Transformer Engine's kernel, which starts every sequence at position 0."""
    assert cp_size == 1 and not interleaved
    place = torch.arange(t.shape[0], dtype=cu_seqlens.dtype, device=torch.device("cpu"))
    sequence = torch.searchsorted(cu_seqlens, place, right=True) - 1
    angles = freqs[:, 0].index_select(0, place - cu_seqlens[sequence])
    half = torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], dim=-1)
    return t * angles.cos() + half * angles.sin()


def scored(batch: SequenceBatch) -> Experience:
    draw = torch.Generator().manual_seed(5)
    num_tokens = int(batch.response_lengths.sum())
    old, ref, sampler = torch.rand(3, num_tokens, generator=draw).neg().unbind()
    rewards = torch.rand(NUM_ROWS, generator=draw)
    credit = Credit(torch.randn(NUM_ROWS, generator=draw), torch.ones(NUM_ROWS), rewards >= 0, {})
    lengths = batch.response_lengths.numpy()
    columns = {
        "token_ids": response_tokens(batch).numpy(),
        "sampler_logprobs": sampler.numpy(),
    }
    row_numbers = np.arange(NUM_ROWS)
    responses = Responses(
        prompts=(),
        group_ids=row_numbers // 3,
        lengths=lengths,
        truncated=row_numbers < 0,
        weight_versions=row_numbers,
        scores=(),
        tokens=TokenRows(row_numbers, lengths, columns),
        holders=0 * row_numbers,
    )
    return Experience(
        responses=responses,
        sequences=Sequences(batch.prompt_lengths, batch.response_lengths),
        group_ids=torch.arange(NUM_ROWS) // 3,
        rewards=rewards,
        correct=rewards > 0.5,
        truncated=torch.zeros(NUM_ROWS, dtype=torch.bool),
        credit=credit,
        ref=TokenScores(ref),
        old=TokenScores(old),
    )


def near(batch: SequenceBatch, logprobs: Tensor, draw: torch.Generator) -> Experience:
    """Scored, with old and reference logprobs near ``logprobs``, so that some ratios are
    clipped."""
    noise = torch.randn(2, len(logprobs), generator=draw)
    advantages = torch.randn(NUM_ROWS, generator=draw)
    every = torch.ones(NUM_ROWS, dtype=torch.bool)
    return replace(
        scored(batch),
        credit=Credit(advantages, torch.ones(NUM_ROWS), every, {}),
        old=TokenScores(logprobs + 0.3 * noise[0]),
        ref=TokenScores(logprobs + 0.2 * noise[1]),
    )


def of_host(device: SimulatedDevice, function: Callable[..., Any]) -> Callable[..., Any]:
    """What it makes beside a tensor of the host, on the device of that tensor, is of the host."""

    def made(*args: Any) -> Any:
        before, device.paused = device.paused, True
        found = function(*args)
        device.paused = before
        for tensor in found if isinstance(found, tuple) else (found,):
            device.take(tensor)
        return found

    return made


def counted(device: SimulatedDevice, action: Callable[[], Any]) -> dict[str, dict[str, int]]:
    device.clear()
    action()
    return {
        "waits": dict(device.waits),
        "queued": dict(device.queued),
        "vendor": dict(device.vendor),
    }


def trips(policy: MegatronPolicy, fused: bool, batch: SequenceBatch) -> dict[str, Any]:
    """For 2 and 4 micro-batches, as a step of training calls the policy."""
    batch = replace(batch, prompt_index=None)
    experience = scored(batch)
    method = load_method("grpo", ["mismatch.kind=tis", "entropy.coef=0.01"])
    signals = signals_of(method)
    device = SimulatedDevice(VENDOR)
    for tensors in policy.training_tensors.values():
        for tensor in tensors():
            if tensor.dim():
                device.put(tensor)
    for module in policy.modules:
        # megatron's are no buffers, and those of latent attention lie in its layers.
        angles = [each.inv_freq for each in module.modules() if hasattr(each, "inv_freq")]
        for tensor in (*angles, *module.buffers()):
            device.put(tensor)

    def logprobs(split: list[list[int]]) -> TokenScores:
        return policy.score(LocalBatch(batch, split), ENTROPY).map(torch.Tensor.cpu)

    def update(split: list[list[int]]) -> None:
        local = LocalBatch(batch, split)
        tokens = experience.scored_tokens
        loss = MinibatchLoss(method, signals, experience, range(NUM_ROWS), tokens, local)
        result = policy.update(local, loss, signals.update_outputs, scores=ENTROPY)
        assert result.scores is not None
        result.scores.map(torch.Tensor.cpu)

    policy.config.apply_rope_fusion = fused
    figures: dict[str, Any] = {}
    with (
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", fused_rotary),
        mock.patch.multiple(
            window_attention,
            **{name: of_host(device, getattr(window_attention, name)) for name in OF_GRIDS},
        ),
        device.watched(),
    ):
        figures["first"] = logprobs(SPLITS[2]).logprobs.tolist()
        update(SPLITS[2])  # tables and moments are made
        for number, split in SPLITS.items():
            for action in (logprobs, update):
                figures[f"{action.__name__} {number}"] = counted(
                    device, lambda action=action, split=split: action(split)
                )
    return figures


def figures(folder: Path) -> dict[str, Any]:
    """``trips`` of models of 2 and 4 layers, with and without the fused rotary embedding."""
    found: dict[str, Any] = {}
    for layers in (2, 4):
        path = zoo.save_tiny_model("qwen2", folder / f"qwen2-{layers}", layers=layers)
        for fused in (False, True):
            policy = tiny_policy(path, {}, keep_reference=False)
            kind = "fused" if fused else "plain"
            found[f"{layers} {kind}"] = trips(policy, fused, make_batch())
            policy.close()
    return found


def figures_of_others(folder: Path) -> dict[str, Any]:
    """The same of a vision-language model, whose angles no fused kernel takes, of experts, and
    of latent attention."""
    found: dict[str, Any] = {}
    for layers in (2, 4):
        path = zoo.save_tiny_model("qwen2_5_vl", folder / f"images-{layers}", layers=layers)
        policy = seeing_policy(path, {}, keep_reference=False)
        found[f"{layers} images"] = trips(policy, False, seeing_batch())
        policy.close()
        for kind, family, fused in (("experts", "qwen3_moe", True), ("latent", "moonlight", False)):
            path = zoo.save_tiny_model(family, folder / f"{kind}-{layers}", layers=layers)
            policy = tiny_policy(path, {}, keep_reference=False)
            found[f"{layers} {kind}"] = trips(policy, fused, make_batch())
            policy.close()
    return found
