"""Layouts of the policy that are compared with transformers: model, layout, number of processes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatron_rl.config.load import compose
from megatron_rl.config.model_config import model_sizes
from megatron_rl.config.rules.layout_rules import layout_problems
from megatron_rl.config.schema import OptimConfig, ParallelConfig, PrecisionConfig
from tests import zoo


@cache
def _defaults(group: str) -> dict[str, Any]:
    return compose(group)


DEFAULTS: dict[str, Any] = _defaults("parallel/single") | {"distributed_optimizer": False}


def parallel(**layout: Any) -> ParallelConfig:
    """One rank without distributed optimizer, but for ``layout``."""
    return ParallelConfig(**(DEFAULTS | layout))


def precision(params: str = "float32") -> PrecisionConfig:
    return PrecisionConfig(**(_defaults("precision/bf16") | {"params": params}))


def optim(**more: Any) -> OptimConfig:
    """AdamW with a large rate and epsilon: one step is then well conditioned, and may be
    compared."""
    fields: dict[str, Any] = dict(
        learning_rate=0.1,
        min_learning_rate=0.0,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.99,
        eps=0.1,
        clip_grad=0.0,
    )
    return OptimConfig(**(_defaults("optim/adam") | fields | more))


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


def _case(
    model: str, processes: int, full: bool = False, layers: int | None = None, **layout: Any
) -> Case:
    marks = "-".join(f"{key}_{value}" for key, value in layout.items()) or "plain"
    return Case(f"{model}-{processes}-{marks}", model, processes, layout, full, layers)


# The core tier has every family on one rank, and every value of each field with some family; all
# families in all layouts are in the full one.
_LISTED = [
    _case("qwen2", 1),
    _case("qwen3", 1),
    _case("qwen3_yarn", 1),
    _case("llama", 1),
    _case("mistral", 1),
    _case("mistral_window", 1),
    _case("phi3", 1),
    _case("phi3", 2, distributed_optimizer=True, full=True),
    _case("olmo2", 1, full=True),
    _case("olmo2", 2, tensor=2, full=True),
    _case("olmo3", 1),
    _case("olmo3", 2, tensor=2, sequence=True, full=True),
    _case("olmo3", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("olmo3", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("olmo3", 2, distributed_optimizer=True, full=True),
    _case("qwen3_moe", 1),
    _case("mixtral", 1),
    _case("gemma3", 1),
    _case("gemma3_yarn", 1, full=True),
    _case("glm4_moe", 1),
    _case("gpt_oss", 1),
    _case("qwen3_next", 1),
    _case("qwen3_5", 1),
    _case("qwen3_5_moe", 1),
    _case("deepseek_v3", 1),
    _case("moonlight", 1),
    _case("qwen2", 1, recompute="full", full=True),
    _case("qwen2", 1, recompute="selective", full=True),
    _case("qwen2", 2, tensor=2, full=True),
    _case("qwen3", 2, tensor=2, full=True),
    _case("llama", 2, tensor=2, full=True),
    _case("qwen3", 2),
    _case("qwen3", 2, pipeline=2, virtual_pipeline=2),
    _case("llama", 2, context=2),
    _case("qwen3_moe", 2, expert=2),
    _case("qwen3_moe", 2, tensor=2, sequence=True, distributed_optimizer=True, full=True),
    _case("gemma3", 2, tensor=2, sequence=True, full=True),
    _case("gemma3", 2, tensor=2, sequence=True, recompute="full", full=True),
    _case("gemma3", 2, tensor=2, recompute="selective", full=True),
    _case("gemma3", 2, pipeline=2, virtual_pipeline=2, full=True),
    _case("gemma3", 2, context=2, full=True),
    _case("gemma3", 2, distributed_optimizer=True, full=True),
    _case("glm4_moe", 2, tensor=2, sequence=True, expert=2, full=True),
    _case("glm4_moe", 2, pipeline=2, full=True),
    _case("glm4_moe", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("glm4_moe", 2, expert=2, distributed_optimizer=True, full=True),
    _case("glm4_moe", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("gpt_oss", 2, tensor=2, sequence=True, expert=2, full=True),
    _case("gpt_oss", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("gpt_oss", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("gpt_oss", 2, expert=2, distributed_optimizer=True, full=True),
    _case("qwen3_next", 2, tensor=2, sequence=True, expert=2, full=True),
    _case("qwen3_next", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("qwen3_next", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("qwen3_next", 2, context=2, full=True),
    _case("qwen3_next", 2, expert=2, distributed_optimizer=True, full=True),
    _case("qwen3_5", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("qwen3_5", 2, distributed_optimizer=True, full=True),
    _case("qwen3_5_moe", 2, tensor=2, sequence=True, expert=2, full=True),
    _case("qwen3_5_moe", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("qwen3_5_moe", 2, expert=2, distributed_optimizer=True, full=True),
    _case("deepseek_v3", 2, tensor=2, sequence=True, expert=2),
    _case("deepseek_v3", 2, pipeline=2, virtual_pipeline=2, recompute="full", full=True),
    _case("deepseek_v3", 2, expert=2, distributed_optimizer=True, full=True),
    _case("deepseek_v3", 2, tensor=2, sequence=True, recompute="selective", full=True),
    _case("qwen3_moe", 2, expert=2, distributed_optimizer=True),
    _case("mixtral", 2, tensor=2, sequence=True, expert=2),
    _case("qwen2", 2, tensor=2, sequence=True, recompute="full"),
    _case(
        "llama", 2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    _case("qwen2_tied", 2, pipeline=2, first_stage_layers=1, last_stage_layers=3, full=True),
    _case("mistral", 2, tensor=2, full=True),
    _case("mistral", 2, pipeline=2, virtual_pipeline=2, full=True),
    _case("qwen2", 2, overlap_grad_reduce=True, full=True),
    _case("qwen2", 4, tensor=2, pipeline=2, full=True),
    _case("qwen3", 4, tensor=2, pipeline=2),
    _case("llama", 4, tensor=2, pipeline=2, full=True),
    _case("llama", 4, tensor=2, context=2, sequence=True, full=True),
    _case("qwen3_moe", 4, expert=2, pipeline=2, full=True),
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
    _case("qwen3_moe", 4, expert=4, full=True),
    _case("mixtral", 4, expert=2, distributed_optimizer=True, recompute="selective", full=True),
    _case("mixtral", 2, tensor=2, sequence=True, expert_tensor=2, full=True),
    _case("mixtral", 4, tensor=2, sequence=True, full=True),
    _case("qwen3_moe", 4, tensor=2, sequence=True, pipeline=2, full=True),
]
# What every family has to have, in the full tier where it is not in the list.
ASKED: tuple[dict[str, Any], ...] = (
    dict(tensor=2, sequence=True),
    dict(pipeline=2),
    dict(context=2),
    {},
    dict(expert=2),
)


def with_asked(listed: list[Case], models: Iterable[str]) -> list[Case]:
    """The cases, and those of ``models`` in layouts of ASKED that are not among them."""
    names = {case.name for case in listed}
    found = [
        _case(model, 2, full=True, **layout)
        for model in models
        for layout in ASKED
        if "expert" not in layout or zoo.has_experts(model)
    ]
    return [*listed, *(case for case in found if case.name not in names)]


CASES = with_asked(_LISTED, zoo.FAMILIES)


@cache
def random_cases(number: int, seed: int = 1) -> list[Case]:
    """Layouts that the rules allow, of up to four processes, with and without experts."""
    draw = random.Random(seed)
    models = ("qwen2", "qwen2_tied", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral")
    sizes = {model: model_sizes(zoo.tiny_model(model).config.to_dict()) for model in models}
    cases: dict[str, Case] = {}
    while len(cases) < number:
        model = draw.choice([*models, "qwen3_moe", "mixtral"])
        has_experts = sizes[model].num_experts > 0
        layout: dict[str, Any] = dict(
            tensor=draw.choice([1, 2, 2, 4]),
            pipeline=draw.choice([1, 1, 2, 4]),
            context=draw.choice([1, 1, 2, 4]),
            expert=draw.choice([1, 1, 2, 4]) if has_experts else 1,
            expert_tensor=draw.choice([1, 1, 2]) if has_experts else 1,
            sequence=draw.random() < 0.5,
            distributed_optimizer=draw.random() < 0.4,
            overlap_grad_reduce=draw.random() < 0.3,
            recompute=draw.choice(["none", "selective", "full"]),
        )
        if layout["pipeline"] > 1 and draw.random() < 0.4:
            layout["virtual_pipeline"] = 2
        processes = draw.choice([1, 2, 2, 4, 4])
        if layout["expert_tensor"] > 1 and layout["pipeline"] > 1:
            continue  # refused without a GPU
        if list(layout_problems(sizes[model], parallel(**layout), processes)):
            continue
        same = ("none", False, 1)
        told = {key: value for key, value in layout.items() if value is True or value not in same}
        case = replace(_case(model, processes, **told), layout=layout)
        cases.setdefault(case.name, case)
    return list(cases.values())


METHOD_NAMES = ("grpo", "gspo", "apo")
AGGREGATIONS = (
    "seq_mean_token_mean",
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)
# Layouts of the table of methods: name -> (processes, layout, nightly). "dense" and "experts" are
# the one-rank answers.
TABLE: dict[str, tuple[int, dict[str, Any], bool]] = {
    "dense": (1, {}, False),
    "experts": (1, {}, False),
    "tensor": (2, dict(tensor=2), False),
    "interleaved": (2, dict(pipeline=2, virtual_pipeline=2), True),
    "context": (2, dict(context=2), False),
    "experts_expert": (2, dict(expert=2), True),
    "pipeline": (2, dict(pipeline=2), True),
    "data": (2, {}, True),
    "sequence": (2, dict(tensor=2, sequence=True), True),
    "uneven": (2, dict(pipeline=2, first_stage_layers=1, last_stage_layers=3), True),
    "recompute": (2, dict(tensor=2, sequence=True, recompute="full"), True),
    "experts_pipeline": (2, dict(pipeline=2), True),
    "experts_sequence": (2, dict(tensor=2, sequence=True, expert=2), True),
    "tensor_pipeline": (4, dict(tensor=2, pipeline=2), True),
    "tensor_context": (4, dict(tensor=2, context=2, sequence=True), True),
    "context_data": (4, dict(context=2), True),
    "interleaved_tensor": (4, dict(tensor=2, pipeline=2, virtual_pipeline=2), True),
    "context_interleaved": (4, dict(context=2, pipeline=2, virtual_pipeline=2), True),
    "data_4": (4, {}, True),
    "experts_expert_data": (4, dict(expert=2), True),
    "experts_expert_pipeline": (4, dict(expert=2, pipeline=2), True),
}
