"""The runs of the resume test: layouts, number formats and models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A run: its layout (what differs from one rank), its number format, the model, whether a
    reference is kept."""

    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    model: str = "llama"
    reference: bool = False


SHARDED = {"distributed_optimizer": True}
CASES = {
    2: [
        Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
        Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
        Case("dp2", SHARDED),
        Case("dp2_bf16", SHARDED, "bfloat16", reference=True),
        Case(
            "dp2_overlap",
            {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True},
            "bfloat16",
        ),
        Case("pp2_tied", {"pipeline": 2}, model="qwen2_tied", reference=True),
        Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
    ],
    4: [
        Case("tp2_pp2", {"tensor": 2, "pipeline": 2}, reference=True),
        Case(
            "tp2_pp2_bf16_vpp",
            {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, **SHARDED},
            "bfloat16",
        ),
        Case("tp2_dp2", {"tensor": 2, **SHARDED}, reference=True),
        Case("tp4_two_heads", {"tensor": 4}),  # two ranks share each key-value head
    ],
}
# Checkpoint of one case read into another layout (of 2 ranks).
RESHAPES = [
    ("tp2", Case("dp2", reference=True)),
    ("tp2", Case("pp2", {"pipeline": 2}, reference=True)),
    ("tp2_pp2", Case("tp2", {"tensor": 2}, reference=True)),
    ("tp2_dp2", Case("pp2", {"pipeline": 2, **SHARDED}, reference=True)),
    ("tp4_two_heads", Case("tp2", {"tensor": 2})),
    ("pp2_tied", Case("tp2", {"tensor": 2}, model="qwen2_tied", reference=True)),
    (
        "ep2",
        Case("tp2_ep2", {"tensor": 2, "sequence": True, "expert": 2, **SHARDED}, model="qwen3_moe"),
    ),
]

# Checkpoint of one case read into another layout, by number of ranks, and written again.
MOVES = {
    1: [
        ("dp2", Case("alone", SHARDED)),
        ("dp2_bf16", Case("alone", SHARDED, "bfloat16", reference=True)),
        ("tp2", Case("alone", reference=True)),
    ],
    2: [
        ("tp2", Case("pp2", {"pipeline": 2}, reference=True)),
        ("tp2", Case("dp2", reference=True)),
        ("tp2_bf16", Case("pp2", {"pipeline": 2}, "bfloat16")),
        ("dp2_bf16", Case("tp2", {"tensor": 2, **SHARDED}, "bfloat16", reference=True)),
        ("pp2_tied", Case("tp2", {"tensor": 2}, model="qwen2_tied", reference=True)),
        (
            "ep2",
            Case(
                "tp2_ep2",
                {"tensor": 2, "sequence": True, "expert": 2, **SHARDED},
                model="qwen3_moe",
            ),
        ),
    ],
    4: [
        ("dp2_bf16", Case("tp2_dp2", {"tensor": 2, **SHARDED}, "bfloat16", reference=True)),
        ("ep2", Case("ep2_dp2", {"expert": 2, **SHARDED}, model="qwen3_moe")),
        ("tp2_bf16", Case("pp2_dp2", {"pipeline": 2}, "bfloat16")),
    ],
}

# Layouts into which the weights of a converted checkpoint are read.
CONVERTED = [
    Case("tp2", {"tensor": 2}),
    Case("pp2", {"pipeline": 2}, "bfloat16", model="qwen2_tied"),
    Case("tp2_tied", {"tensor": 2}, model="qwen2_tied"),
    Case("ep2", {"expert": 2}, model="qwen3_moe"),
]

MEASURED = [
    Case("tp2", {"tensor": 2, "sequence": True}),
    Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
    Case("dp2", SHARDED),
    Case("dp2_bf16", SHARDED, "bfloat16"),
    Case("selective", {"tensor": 2, "recompute": "selective"}),
    Case("pp2_tied", {"pipeline": 2}, model="qwen2_tied"),
]
