"""Planned weights, gradients, optimizer and activations are within a tenth of what a tiny model
really allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_rl.config.load import compose
from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.planning import memory
from megatron_rl.planning.memory import Workload
from megatron_rl.policy.activations import layer_activations
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import create_state, parts
from megatron_rl.runtime.device import platform
from tests.numerics.small_policy import SHARDED, Case, batch, build, precision, shares
from tests.ranks import on_ranks

CASES = [
    Case("tp2", {"tensor": 2, "sequence": True}),
    Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
    Case("dp2", SHARDED),
    Case("dp2_bf16", SHARDED, "bfloat16"),
    Case("selective", {"tensor": 2, "recompute": "selective"}),
    Case("pp2_tied", {"pipeline": 2}, model="qwen2_tied"),
    Case("experts", {"tensor": 2, "sequence": True, **SHARDED}, model="qwen3_moe"),
    Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
    Case("first_dense", {"pipeline": 2}, "bfloat16", model="glm4_moe"),
    Case("windows", {"tensor": 2, "sequence": True}, model="gemma3"),
    Case("fused_files", {"tensor": 2, "sequence": True}, model="phi3"),
    Case("heads_norm", {"tensor": 2, "sequence": True}, model="olmo3"),
    Case("sinks", {"tensor": 2, "sequence": True, "expert": 2}, "bfloat16", model="gpt_oss"),
    Case("delta", {"tensor": 2, "sequence": True, "expert": 2}, "bfloat16", model="qwen3_next"),
    Case("four_matrices", {"tensor": 2, "sequence": True}, model="qwen3_5"),
    Case("latent", {"tensor": 2, "sequence": True, **SHARDED}, model="deepseek_v3"),
]


@on_ranks(2)
@pytest.mark.parametrize(
    "case",
    [
        # Shares of float32 without bf16 or experts: both are there with one of these.
        pytest.param(case, id=case.name, marks=pytest.mark.full if case.name == "dp2" else ())
        for case in CASES
    ],
)
def test_planned_is_allocated(hf_models: Path, case: Case) -> None:
    policy = build(hf_models, case)
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "kv_cache_gib": 1.0, "stop": ()})
    load = Workload(2, 1024, 1024, logprob_chunk_tokens=256, make_vocab_divisible_by=8, fused=False)
    stages = memory.plan(policy.arch, policy.parallel, precision(case), rollout, load, 1.0)
    planned = stages[policy.ranks.pipeline_rank]
    create_state(policy.optimizer)
    states = 0
    for part in parts(policy.optimizer):
        for parameter, state in part.optimizer.state.items():
            states += sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq"))
            states += parameter.nbytes if case.dtype == "bfloat16" else 0
    chunks = policy.chunks
    buffers = [
        buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    pairs = {
        "weights": (planned.weights, sum(item.tensor.nbytes for item in policy.held)),
        "gradients": (planned.gradients, sum(buffer.grad_data.nbytes for buffer in buffers)),
        "optimizer": (planned.optimizer, states),
    }
    # What experts keep depends on how their tokens are sent; the plan takes it from dense layers.
    if policy.ranks.pipeline == 1 and not policy.arch.num_experts:
        saved, tokens = saved_bytes(policy)
        element = ITEM_BYTES[case.dtype]
        pairs["activations"] = (
            layer_activations(policy.arch, policy.parallel, tokens, element, fused=False),
            saved,
        )
    for what, (plan, real) in pairs.items():
        assert 0.9 <= plan / real <= 1.1, f"{what} planned {plan}, allocated {real}"
    policy.close()


def saved_bytes(policy: MegatronPolicy) -> tuple[int, int]:
    """(bytes that the second and third layer really keep for their backward: the mean; tokens)."""
    microbatch = policy.batching.packed(batch(0), shares(policy, 1))[0]
    known = {tensor.untyped_storage().data_ptr() for tensor in policy.modules[0].parameters()}
    storages: dict[int, int] = {}
    alive: list[Any] = []  # else an address could be used twice
    counted: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    model = get_attr_wrapped_model(policy.modules[0], "decoder", return_model_obj=True)
    for layer in model.decoder.layers[1:3]:
        layer.register_forward_pre_hook(lambda *_: storages.clear())
        layer.register_forward_hook(lambda *_: counted.append(sum(storages.values())))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), platform():
        policy.modules[0](
            input_ids=microbatch.token_ids,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=microbatch.packing,
        )
    return sum(counted) // len(counted), microbatch.token_ids.numel()
