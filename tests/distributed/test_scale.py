"""7B, 70B and 235B models on 8 to 512 ranks, without the ranks: the messages of a step, the plan of
a weight sync, the memory plan.

The messages are those of the real update on a narrow model of the same layout, counted; the same
formula then speaks of the true widths (``pytest -s`` prints its table). No figure here is a
measurement.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.layout_rules import stage_layers
from megatron_rl.config.schema import Config
from megatron_rl.models import architecture_from
from megatron_rl.planning.at_start import plan as memory_plan
from megatron_rl.planning.parameter_counts import stage_counts
from megatron_rl.planning.phases import MemoryBudget, describe, problems
from megatron_rl.weight_sync.planner.plan import PlanSettings, make_plan
from tests.distributed.big_models import CASES, CONFIGS, Case, train_layout, write_config
from tests.distributed.fake_world import Kind
from tests.distributed.step_formula import Messages, Place, Step, Work, differences
from tests.launch import REPO, run
from tests.unit.weight_sync.training_tables import shape_from_hf, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.plan_figures import streams
from tools.planning.sync_time import Links, least_seconds, simulated_seconds

CORE = [case for case in CASES if not case.full]
FULL = [case for case in CASES if case.full]
BUCKET = 256 << 20


def played(cases: list[Case], folder: Path, timeout: float) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.distributed.scale_worker",
        str(folder),
        *[case.name for case in cases],
    ]
    done = run(command, timeout, cwd=REPO)
    for case in cases:
        for rank in case.looked_at:
            overlapped = "overlap_param_gather" in case.layout
            for what in ("shards", "logprobs", "update") + (() if overlapped else ("gathering",)):
                assert f"OK {case.name}, rank {rank}, {what}:" in done.stdout, done.stdout


@pytest.mark.full
def test_messages_of_a_step_are_those_of_the_formula(tmp_path):
    played(CORE, tmp_path, 280)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=[case.name for case in FULL])
def test_messages_of_a_step_on_more_layouts(tmp_path, case):
    played([case], tmp_path, 280)


def test_a_difference_is_named():
    kind = Kind("all_reduce", "tensor", 4, "float32")
    expected = Messages(Counter({kind: 2}), Counter({kind: 64}))
    assert list(differences(expected, Counter({kind: 2}), Counter({kind: 64}))) == []
    (more,) = differences(expected, Counter({kind: 3}), Counter({kind: 96}))
    assert more == f"{kind}: the formula says (calls, bytes) (2, 64), it was (3, 96)"
    (absent,) = differences(Messages(), Counter({kind: 1}), Counter({kind: 4}))
    assert absent == f"{kind}: the formula says (calls, bytes) (0, 0), it was (1, 4)"


def true_steps(case: Case) -> list[Step]:
    """The formula for the first rank of each stage at the true widths: 8 micro-batches of 8192
    tokens."""
    parallel, arch = (
        case.parallel(narrow=False),
        architecture_from(CONFIGS[case.model], CONFIGS[case.model].architectures[0]),
    )
    chunks = parallel.virtual_pipeline or 1
    stages = [(count // chunks,) * chunks for count in stage_layers(arch, parallel)]
    return [
        Step(arch, parallel, case.ranks, Place(stage, 0, layers), Work(8, 8192, 1024), 128)
        for stage, layers in enumerate(stages)
    ]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_true_widths(case):
    """Gradients that are summed are those of the memory plan's parameters, but for what is filled
    up; and the table."""
    steps = true_steps(case)
    counts = stage_counts(steps[0].arch, steps[0].parallel, 128)
    for step, (dense, experts) in zip(steps, counts, strict=True):
        found = step.update()
        for group, numbers in (("data and context", dense), ("expert data", experts)):
            summed = sum(
                size
                for kind, size in found.bytes.items()
                if kind.name == "reduce_scatter" and kind.group == group
            )
            assert 4 * numbers <= summed <= 4 * numbers * 1.0001 + 4 * 128 * 64, (step.place, group)
    print(
        f"\n{case.name}: update of a rank of the first stage, 8 micro-batches of 8192 tokens "
        "(formula, not a measurement)"
    )
    total = steps[0].update()
    for kind in sorted(total.calls, key=lambda kind: -total.bytes[kind])[:8]:
        print(
            f"  {kind.name:14} {kind.group:17} of {kind.ranks:3} {total.calls[kind]:6} calls "
            f"{total.bytes[kind] / 1e9:9.3f} GB"
        )


def engine_bytes(model: ModelShape, ranks: int) -> int:
    """Bytes of all weights on the ranks of one replica: matrices once, keys and values at least
    once a rank, norms and routers everywhere."""
    keys = 2 * max(model.kv_heads, ranks) * model.head_dim
    rows = model.heads * model.head_dim + keys
    layer = (
        rows * model.hidden
        + model.heads * model.head_dim * model.hidden
        + (rows if model.qkv_bias else 0)
    )
    layer += 3 * (model.experts * model.moe_ffn if model.experts else model.ffn) * model.hidden
    whole = (
        2 * model.hidden
        + (2 * model.head_dim if model.qk_norm else 0)
        + model.experts * model.hidden
    )
    return 2 * (
        2 * model.vocab * model.hidden
        + model.layers * (layer + ranks * whole)
        + ranks * model.hidden
    )


def planned(case: Case, rollout_tensor: int, slack: float) -> None:
    """Every byte of every engine rank arrives once, from itself or from another; the messages,
    simulated one by one in their rounds, end within ``slack`` of what the busiest link needs."""
    config, parallel = CONFIGS[case.model], case.parallel(narrow=False)
    model = shape_from_hf(config.to_dict())
    train = train_layout(parallel, case.ranks)
    rollout = RolloutLayout(tp=rollout_tensor, dp=case.ranks // rollout_tensor)
    sources = {rank: train_shards(model, train, rank) for rank in range(case.ranks)}
    targets = {rank: rollout_shards(model, rollout, rank) for rank in rollout.ranks}
    settings = PlanSettings(BUCKET, gpus_per_node=8, replicas=rollout.replicas)
    plan = make_plan(sources, targets, settings)
    assert plan.bytes_local + plan.bytes_sent == rollout.dp * engine_bytes(model, rollout_tensor)
    assert plan.bytes_sent == plan.lower_bound
    sent: Counter[tuple[str, int]] = Counter()
    for (source, target, _), size in streams(plan.flows).items():
        sent["out of", source] += size
        sent["into", target] += size
    needed = math.ceil(max(sent.values()) / BUCKET)
    assert needed <= plan.schedule.rounds
    links = Links(nvlink_gb_s=400.0, network_gb_s=45.0)
    assert simulated_seconds(plan, links) <= slack * least_seconds(plan, links)
    print(
        f"\n{case.name}: {plan.bytes_sent / 1e9:.1f} GB sent, "
        f"{plan.bytes_local / 1e9:.1f} GB local, {plan.schedule.rounds} rounds"
    )


def named(name: str) -> Case:
    (case,) = [case for case in CASES if case.name == name]
    return case


SMALL_PLANS = [(CORE[0], 2, 1.15), (CORE[2], 8, 1.15)]
# What is handed on inside a node overlaps with what comes from other nodes only in part: with
# experts on 8 ranks and engines as wide as a node that shows.
LARGE_PLANS = [
    (CORE[3], 8, 1.4),
    (named("70b on 256: tensor=8,pipeline=4,context=2"), 8, 1.15),
]


@pytest.mark.parametrize(
    ("case", "tensor", "slack"), SMALL_PLANS, ids=[case.name for case, *_ in SMALL_PLANS]
)
def test_plans_of_weight_syncs(case, tensor, slack):
    planned(case, tensor, slack)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "tensor", "slack"), LARGE_PLANS, ids=[case.name for case, *_ in LARGE_PLANS]
)
def test_large_plans_of_weight_syncs(case, tensor, slack):
    planned(case, tensor, slack)


@pytest.mark.parametrize(
    ("model", "ranks", "layout", "gpu_gib", "lacking"),
    [
        ("7b", 8, ["parallel=tp4", "rollout.tensor=2"], 79.1, None),
        ("7b", 1, ["parallel=single", "rollout.tensor=1"], 79.1, "training"),
        (
            "70b",
            64,
            ["parallel=tp8_pp4", "parallel.recompute=full", "rollout.tensor=8"],
            79.1,
            None,
        ),
        (
            "70b",
            8,
            ["parallel=tp8", "parallel.recompute=full", "rollout.tensor=8"],
            79.1,
            "training",
        ),
        ("235b", 64, ["parallel.pipeline=4", "parallel.expert=8"], 79.1, "training"),
        ("235b", 256, ["parallel.pipeline=8", "parallel.expert=32"], 79.1, None),
    ],
)
def test_memory_plans(tmp_path, model, ranks, layout, gpu_gib, lacking):
    write_config(model, tmp_path)
    overrides = [
        *layout,
        f"model.path={tmp_path}",
        "data.train=-",
        "data.eval=-",
        "batch.tokens_per_microbatch=4096",
    ]
    if model == "235b":
        ends = 23 if ranks == 64 else 11
        overrides += [
            "parallel.tensor=4",
            "parallel.sequence=true",
            "parallel.recompute=full",
            "rollout.tensor=8",
            "rollout.gpu_memory_utilization=0.8",
        ]
        overrides += [f"parallel.first_stage_layers={ends}", f"parallel.last_stage_layers={ends}"]
    overrides += [
        "rollout.max_prompt_tokens=1024",
        "rollout.max_response_tokens=3072",
        "memory.offload=[optimizer,gradients,weights]",
    ]
    config = validate(Config, compose("config", overrides), "test")
    room = MemoryBudget("cuda", gpu_gib)
    stages = memory_plan(config, ranks, room, fused=True)
    found = problems(stages, config, room)
    print(describe(stages, config, room))
    if lacking is None:
        assert found == []
    else:
        assert any(text.startswith(f"{lacking} needs") for text in found), found


@pytest.mark.parametrize(("gpu_gib", "fits"), [(79.1, True), (139.8, True), (39.4, False)])
def test_memory_plan_of_the_experiment(tmp_path, gpu_gib, fits):
    """Eight GPUs of 80 and of 141 GB have room for it, eight of 40 GB do not."""
    write_config("7b", tmp_path)
    overrides = ["experiment=qwen2_5_7b_8gpu", f"model.path={tmp_path}"]
    overrides += ["data.train=-", "data.eval=-"]
    config = validate(Config, compose("config", overrides), "test")
    room = MemoryBudget("cuda", gpu_gib)
    found = problems(memory_plan(config, 8, room, fused=True), config, room)
    assert (found == []) == fits, found
