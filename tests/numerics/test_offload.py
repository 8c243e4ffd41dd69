"""What leaves the device between two steps comes back bit for bit, under real megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.passes import LocalBatch
from megatron_rl.policy.megatron_policy import MegatronPolicy
from tests import zoo
from tests.numerics.policy_state import record
from tests.numerics.small_policy import OVERLAPPED, SHARDED, Case, batch, build, shares, update
from tests.ranks import on_ranks

CORE = (
    Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
    Case("dp2_overlap", OVERLAPPED, "bfloat16"),
)
FULL = (
    Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
    Case("dp2", SHARDED),
    Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
)
CASES = [
    *(pytest.param(case, id=case.name) for case in CORE),
    *(pytest.param(case, id=case.name, marks=pytest.mark.full) for case in FULL),
]


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("case", CASES)
def test_training_with_everything_offloaded_at_every_step_is_training_without(
    hf_models: Path, case: Case
) -> None:
    """TP, the distributed optimizer (overlapped too), experts; float32 and bfloat16."""
    want = run(hf_models, case, offloading=False)
    got = run(hf_models, case, offloading=True)
    assert got["norms"] == want["norms"]
    for key in ("logprobs", "state"):
        different = [
            i
            for i, (a, b) in enumerate(zip(got[key], want[key], strict=True))
            if not torch.equal(a, b)
        ]
        assert not different, f"{key} {different} differ"


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


def away_and_back(policy: MegatronPolicy) -> None:
    before = sizes(policy)
    assert all(before.values()), before
    wanted = {name: tensor.clone() for name, tensor in policy.gathered_weights()}
    policy.offload(("optimizer", "gradients"))
    assert sizes(policy)["gradients"] == 0 and sizes(policy)["weights"] == before["weights"], (
        f"{sizes(policy)}"
    )
    synced = dict(policy.gathered_weights())  # what a weight sync reads
    assert all(torch.equal(synced[name], tensor) for name, tensor in wanted.items())
    policy.offload(("weights",))
    assert not any(sizes(policy).values()), f"{sizes(policy)}"
    work: Any = (batch(9), shares(policy, 2))
    for call in (
        lambda: policy.score(LocalBatch(*work)),
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
    assert sizes(policy) == before, f"{sizes(policy)} after, {before} before"


def run(models: Path, case: Case, *, offloading: bool) -> dict[str, Any]:
    policy = build(models, case)
    norms = []
    logprobs = []
    for step in range(3):
        norms.append(update(policy, step))
        if offloading:
            away_and_back(policy)
        scores = policy.score(LocalBatch(batch(9), shares(policy, 2)))
        logprobs.append(zoo.of_all_rows(scores).logprobs)
    found = {"norms": norms, "logprobs": logprobs, "state": record(policy)}
    policy.close()
    return found
