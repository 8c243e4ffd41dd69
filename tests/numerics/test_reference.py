"""Passes with the starting weights, under real megatron: between updates they leave the starting
weights, the trained ones and the course of the training alone; and what is gathered or moved for
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer

from megatron_rl.passes import LocalBatch
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.state import host_memory
from tests import zoo
from tests.numerics.policy_state import record
from tests.numerics.small_policy import OVERLAPPED, SHARDED, Case, batch, build, shares, update
from tests.ranks import on_ranks

OVERLAP = Case("dp2_overlap", OVERLAPPED, "bfloat16", reference=True)
CORE = (OVERLAP,)
FULL = (
    Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
    Case("dp2_bf16", SHARDED, "bfloat16", reference=True),
    Case(
        "pp2_tied_vpp", {"pipeline": 2, "virtual_pipeline": 2}, model="qwen2_tied", reference=True
    ),
    Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe", reference=True),
)
CASES = [
    *(pytest.param(case, id=case.name) for case in CORE),
    *(pytest.param(case, id=case.name, marks=pytest.mark.full) for case in FULL),
]
STEPS = 3


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("case", CASES)
def test_reference_passes_move_the_fewest_bytes_and_change_no_bit_of_the_training(
    hf_models: Path, case: Case
) -> None:
    """TP, the distributed optimizer (overlapped too), a tied interleaved pipeline, experts; float32
    and bfloat16; one copy of the weights a pass at most."""
    want = run(hf_models, case, passes=False)
    got = run(hf_models, case, passes=True)
    assert got["norms"] == want["norms"]
    assert torch.equal(got["scores"], want["scores"])
    pairs = enumerate(zip(got["state"], want["state"], strict=True))
    different = [number for number, (a, b) in pairs if not torch.equal(a, b)]
    assert not different, f"{different} differ"
    # Once to the device for each pass; never back.
    assert got["moved"] == 2 * STEPS * got["bytes"]


def gathers(policy: MegatronPolicy, action: Any) -> int:
    """Gatherings of parameters while ``action`` runs."""
    original = param_and_grad_buffer.dist_all_gather_func
    counted = []

    def count(*args: Any, **kwargs: Any) -> Any:
        counted.append(args)
        return original(*args, **kwargs)

    with mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", count):
        action()
    return len(counted)


@on_ranks(2, timeout=200)
def test_after_an_update_weights_are_gathered_once(hf_models: Path) -> None:
    """By whoever reads them first; nobody gathers again."""
    policy = build(hf_models, OVERLAP)
    buckets = sum(len(group.buckets) for chunk in policy.chunks for group in chunk.bucket_groups)
    assert (
        gathers(policy, lambda: update(policy, 0)) == buckets
    )  # in the forward of the first update
    assert gathers(policy, policy.wait_for_param_gather) == buckets
    again = {
        "wait_for_param_gather": policy.wait_for_param_gather,
        "reference pass": lambda: scores(policy, reference=True),
        "pass": lambda: scores(policy),
        "weights for the engine": lambda: list(policy.gathered_weights()),
        "offload": lambda: (policy.offload(("optimizer", "gradients", "weights")), policy.reload()),
    }
    for name, action in again.items():
        assert gathers(policy, action) == 0, f"{name} gathers again"
    # The whole weights are those of the shards that the optimizer wrote.
    whole = [tensor.clone() for tensor in weights(policy)]
    for chunk in policy.chunks:
        chunk.start_param_sync(force_sync=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, weights(policy), strict=True))
    policy.close()


def ordinary_memory(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Page-locked memory needs a CUDA driver."""
    return torch.full((num_bytes,), 170, dtype=torch.uint8)


def make(models: Path, case: Case) -> MegatronPolicy:
    """Pieces of host memory so small that parameters lie in several of them."""
    small = {"_allocate": ordinary_memory, "LARGEST_BLOCK": 2**12, "SMALLEST_BLOCK": 2**6}
    with mock.patch.multiple(host_memory, **small):
        return build(models, case)


def scores(policy: MegatronPolicy, *, reference: bool = False) -> torch.Tensor:
    own = policy.score(LocalBatch(batch(9), shares(policy, 2)), reference=reference)
    return zoo.of_all_rows(own).logprobs


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def weights(policy: MegatronPolicy) -> list[torch.Tensor]:
    return [item.tensor.detach() for item in policy.held]


def apart(policy: MegatronPolicy) -> None:
    """No reference weight shares memory with a trained one; and the starting weights are what they
    were."""
    assert policy.reference is not None
    assert not storages(policy.reference.tensors().values()) & storages(weights(policy))


def run(models: Path, case: Case, *, passes: bool) -> dict[str, Any]:
    """Three updates, with or without two reference passes before each; what came of them."""
    policy = make(models, case)
    assert policy.reference is not None
    start = {name: tensor.clone() for name, tensor in policy.reference.tensors().items()}
    before = scores(policy)
    kept = []
    norms = []
    for step in range(STEPS):
        if passes:
            where = storages(weights(policy))
            trained = scores(policy)
            kept += [scores(policy, reference=True), scores(policy, reference=True)]
            assert torch.equal(scores(policy), trained), (
                "the trained weights changed in a reference pass"
            )
            assert storages(weights(policy)) == where, "the parameters moved"
            apart(policy)
        norms.append(update(policy, step))
    now = policy.reference.tensors()
    assert all(torch.equal(now[name], tensor) for name, tensor in start.items()), (
        "training moved the reference"
    )
    assert all(torch.equal(one, before) for one in kept), (
        "a reference pass is not one of the starting weights"
    )
    found = {
        "norms": norms,
        "scores": scores(policy),
        "moved": policy.reference.bytes_moved,
        "state": record(policy),
    }
    found["bytes"] = sum(chunk_bytes(chunk, policy) for chunk in policy.chunks)
    policy.close()
    return found


def chunk_bytes(chunk: Any, policy: MegatronPolicy) -> int:
    element = policy.config.params_dtype.itemsize
    return sum(
        buffer.grad_data.numel() * element
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    )
