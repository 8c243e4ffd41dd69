"""torchrun program (2 processes): training with everything offloaded between the steps gives the
bits of training without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.policy.megatron_policy import MegatronPolicy
from tests.numerics.checkpoint_cases import SHARDED, Case
from tests.numerics.checkpoint_worker import batch, build, shares, update
from tests.numerics.policy_state import record

CASES = [
    Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
    Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
    Case("dp2", SHARDED),
    Case(
        "dp2_overlap",
        {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "bfloat16",
    ),
    Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
]


def sizes(policy: MegatronPolicy) -> dict[str, int]:
    """Bytes of the storages under the weights, the gradients and the optimizer's tensors of this
    rank."""
    return {
        part: sum(
            {
                storage._cdata: storage.nbytes()
                for storage in (tensor.untyped_storage() for tensor in tensors())
            }.values()
        )
        for part, tensors in policy.training_tensors.items()
    }


def away_and_back(policy: MegatronPolicy, case: Case) -> None:
    before = sizes(policy)
    assert all(before.values()), before
    wanted = {name: tensor.clone() for name, tensor in policy.gathered_weights()}
    policy.offload(("optimizer", "gradients"))
    assert sizes(policy)["gradients"] == 0 and sizes(policy)["weights"] == before["weights"], (
        f"{case.name}: {sizes(policy)}"
    )
    synced = dict(policy.gathered_weights())  # what a weight sync reads
    assert all(torch.equal(synced[name], tensor) for name, tensor in wanted.items())
    policy.offload(("weights",))
    assert not any(sizes(policy).values()), f"{case.name}: {sizes(policy)}"
    work: Any = (batch(9), shares(policy, 2))
    for call in (
        lambda: policy.score_microbatches(*work),
        lambda: update(policy, 1),
        lambda: next(policy.gathered_weights()),
        lambda: policy.export(Path("nowhere")),
        lambda: policy.save(Path("nowhere"), {}),
    ):
        with pytest.raises(RuntimeError, match=r"offloaded; call reload\(\)"):
            call()
    junk = [
        torch.full((size,), 255, dtype=torch.uint8) for size in before.values()
    ]  # in the memory that was freed
    del junk
    policy.reload()
    assert sizes(policy) == before, f"{case.name}: {sizes(policy)} after, {before} before"


def run(case: Case, offloading: bool) -> dict[str, Any]:
    policy = build(case)
    norms, logprobs = [], []
    for step in range(3):
        norms.append(update(policy, step))
        if offloading:
            away_and_back(policy, case)
        logprobs.append(policy.score_microbatches(batch(9), shares(policy, 2)).logprobs)
    found = {"norms": norms, "logprobs": logprobs, "state": record(policy)}
    policy.close()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        if case.name not in sys.argv[3:]:
            continue
        want, got = run(case, offloading=False), run(case, offloading=True)
        assert got["norms"] == want["norms"], (
            f"{case.name}: gradient norms {got['norms']}, without {want['norms']}"
        )
        for key in ("logprobs", "state"):
            different = [
                i
                for i, (a, b) in enumerate(zip(got[key], want[key], strict=True))
                if not torch.equal(a, b)
            ]
            assert not different, f"{case.name}: {key} {different} differ"
        if dist.get_rank() == 0:
            print(f"OK {case.name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
