"""Layouts of the policy that are compared with transformers: model, layout, number of processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULTS: dict[str, Any] = dict(
    tensor=1, pipeline=1, virtual_pipeline=None, context=1, expert=1, expert_tensor=None, sequence=False, distributed_optimizer=False,
    overlap_grad_reduce=False, overlap_param_gather=False, recompute="none", first_stage_layers=None, last_stage_layers=None,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    processes: int
    layout: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # nightly tier
    layers: int | None = None

    @property
    def sharded_gradients(self) -> bool:
        return bool(self.layout.get("distributed_optimizer"))


def _case(model: str, processes: int, full: bool = False, layers: int | None = None, **layout: Any) -> Case:
    marks = "-".join(f"{key}_{value}" for key, value in layout.items()) or "plain"
    return Case(f"{model}-{processes}-{marks}", model, processes, layout, full, layers)


CASES = [
    _case("qwen2", 1),
    _case("qwen3", 1),
    _case("llama", 1),
    _case("mistral", 1),
    _case("qwen3_moe", 1),
    _case("mixtral", 1),
    _case("qwen2", 1, recompute="full"),
    _case("qwen2", 1, recompute="selective", full=True),
    _case("qwen2", 2, tensor=2),
    _case("qwen3", 2, tensor=2),
    _case("llama", 2, tensor=2),
    _case("qwen2", 2, pipeline=2),
    _case("qwen3", 2, pipeline=2),
    _case("llama", 2, pipeline=2),
    _case("qwen2", 2),
    _case("qwen3", 2),
    _case("llama", 2),
    _case("qwen3", 2, tensor=2, sequence=True),
    _case("qwen3", 2, pipeline=2, virtual_pipeline=2),
    _case("llama", 2, context=2),
    _case("qwen3_moe", 2, expert=2),
    _case("mixtral", 2, tensor=2, sequence=True, expert=2),
    _case("qwen2", 2, tensor=2, sequence=True, recompute="full"),
    _case("llama", 2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    _case("qwen2_tied", 2, pipeline=2, first_stage_layers=1, last_stage_layers=3, full=True),
    _case("mistral", 2, tensor=2, full=True),
    _case("mistral", 2, pipeline=2, virtual_pipeline=2, full=True),
    _case("mixtral", 2, pipeline=2, full=True),
    _case("mixtral", 2, expert=2, full=True),
    _case("qwen2", 2, overlap_grad_reduce=True, full=True),
    _case("qwen2", 4, tensor=2, pipeline=2),
    _case("qwen3", 4, tensor=2, pipeline=2),
    _case("llama", 4, tensor=2, pipeline=2),
    _case("llama", 4, tensor=2, context=2, sequence=True),
    _case("qwen3_moe", 4, expert=2, pipeline=2),
    _case("llama", 4, tensor=4, full=True),
    _case("qwen2", 4, tensor=2, pipeline=2, sequence=True, virtual_pipeline=2, full=True),
    _case("qwen2", 4, pipeline=4, full=True),
    _case("qwen2", 4, pipeline=4, virtual_pipeline=2, layers=8, full=True),
    _case("qwen2_tied", 4, context=2, pipeline=2, virtual_pipeline=2, full=True),
    _case("qwen2", 4, context=4, full=True),
    _case("mistral", 4, tensor=2, pipeline=2, full=True),
    _case("mixtral", 4, tensor=2, sequence=True, expert=2, expert_tensor=2, full=True),
    _case("qwen3_moe", 4, tensor=2, sequence=True, expert=4, full=True),
    _case("qwen3_moe", 4, context=2, expert=2, full=True),
]
