"""What the policy holds, by hand."""

import random
from dataclasses import replace

import pytest

from megatron_rl.config.load import compose
from megatron_rl.config.rules.layout_rules import stage_layers
from megatron_rl.planning.memory import live_layers, workload
from megatron_rl.policy.activations import layer_activations
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from tests.unit.planning_of_7b import (
    EMBEDDING,
    LAYER,
    LOAD,
    PARAMETERS,
    QWEN2_5_7B,
    config,
    of_experts,
    parallel,
    plan,
)
from tests.unit.small_models import EXPERTS


def test_one_rank_of_a_7b_model():
    (stage,) = plan({})
    assert PARAMETERS == 7_615_616_512
    assert (stage.weights, stage.gradients, stage.optimizer) == (
        2 * PARAMETERS,
        4 * PARAMETERS,
        12 * PARAMETERS,
    )
    assert stage.logits == 152064 * (4 * 256 + 2 * 3584)
    (cut,) = plan({}, replace(LOAD, num_kept=100))
    assert cut.logits - stage.logits == 100 * (4 * 1000 + 24 * 256)
    assert stage.kv_cache == 3 * 2**30
    # Two ranks share everything of the engine but norms.
    assert stage.engine_weights == 2 * ((PARAMETERS - 57 * 3584) // 2 + 57 * 3584)


def test_distributed_optimizer_is_shared_by_data_and_context_ranks():
    (stage,) = plan({"distributed_optimizer": True, "context": 2})
    assert stage.optimizer == 12 * PARAMETERS // 8


def test_stages_hold_their_layers_and_ends():
    stages = plan({"pipeline": 4, "first_stage_layers": 4, "last_stage_layers": 6})
    layers = [4, 9, 9, 6]
    ends = [EMBEDDING, 0, 0, EMBEDDING + 3584]
    assert [stage.weights for stage in stages] == [
        2 * (n * LAYER + end) for n, end in zip(layers, ends, strict=True)
    ]
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_a_tied_head_is_one_parameter_on_one_stage_and_a_copy_on_two():
    tied = replace(QWEN2_5_7B, tied_embeddings=True)
    assert plan({}, arch=tied)[0].weights == 2 * (PARAMETERS - EMBEDDING)
    assert sum(stage.weights for stage in plan({"pipeline": 2}, arch=tied)) == 2 * PARAMETERS


def test_experts_are_divided_by_expert_ranks():
    arch = of_experts(8, layers=2)
    one = plan({}, arch=arch)[0].weights
    four = plan({"expert": 4}, arch=arch)[0].weights
    # Bytes x layers x experts elsewhere x (gate, up, down).
    assert one - four == 2 * 2 * (8 - 2) * 3 * 64 * 32


# Bytes of a token: 2 layers x 2 experts x 1, and x 2 above 255 experts.
@pytest.mark.parametrize(("count", "width"), [(8, 4), (300, 8)])
def test_replayed_experts_by_hand(count: int, width: int):
    load = replace(LOAD, tokens_per_step=5000)
    arch = of_experts(count, layers=2)

    def found(replay: str, stages: int = 1) -> list[tuple[int, int]]:
        """On the device and on the host, of each stage."""
        rollout = {"router_replay": replay}
        layout = {"pipeline": stages}
        plain = plan(layout, load, arch)
        replayed = plan(layout, load, arch, rollout=rollout)
        assert {stage.experts for stage in plain} == {0}
        return [
            (one.activations - other.activations, one.experts)
            for one, other in zip(replayed, plain, strict=True)
        ]

    # A micro-batch of 1000 tokens, and the record of the step; the step twice.
    assert found("old_policy") == [(6000 * width, 10_000 * width)]
    # 3 GiB of keys and values, of one head of 16 numbers in two layers of two bytes each.
    in_cache = 3 * 2**30 // (2 * 2 * 16 * 2)
    held = (10_000 + in_cache) * width
    assert found("rollout") == [(1000 * width, held)]
    assert found("rollout", 2) == [(2000 * width, held), (1000 * width, held)]


def activations(arch=QWEN2_5_7B, fused=True, **layout):
    """Bytes of 1000 tokens of two bytes, in units of 2000."""
    return layer_activations(arch, parallel(**layout), 1000, 2, fused=fused) / 2000


def test_activations():
    # Norms 4 x 3584; queries and output 2 x 28 heads, keys and values 2 x 4 heads, of 128; 3 x
    # 18944.
    assert activations() == 4 * 3584 + 64 * 128 + 3 * 18944
    assert activations(tensor=4) == 4 * 3584 + 16 * 128 + 3 * 4736
    assert activations(tensor=4, sequence=True) == 3584 + 16 * 128 + 3 * 4736
    assert activations(recompute="full") == 3584
    # Unfused: the input of each norm twice in four bytes; a third time the queries' width; angles;
    # 5 x 18944.
    assert activations(fused=False) == 10 * 3584 + (92 + 4) * 128 + 5 * 18944


def test_what_is_run_again_keeps_nothing():
    # Fused: of the second norm the input stays. Unfused: its output is what the feed-forward part
    # begins with again.
    assert activations(recompute="selective") == 3 * 3584 + 64 * 128
    assert activations(recompute="selective", tensor=4, sequence=True) == (3 * 3584 + 64 * 128) / 4
    assert activations(fused=False, recompute="selective") == 10 * 3584 + (92 + 4) * 128


def test_experts_run_their_activation_again():
    norms = 2 * 64
    attention = (2 * 4 + 2 * 2) * 16
    assert activations(EXPERTS) == 2 * norms + attention + 2 * (3 * 32 + 2 * 64)
    assert activations(EXPERTS, recompute="selective") == 2 * norms - 64 + attention + 2 * (
        2 * 32 + 2 * 64
    )
    whole = activations(EXPERTS, fused=False) - activations(
        EXPERTS, fused=False, recompute="selective"
    )
    assert whole == 2 * (5 * 32 + 2 * 64)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_layer_at_a_time_has_everything(recompute):
    (stage,) = plan({"recompute": recompute})
    kept = 28 * activations(recompute=recompute)
    whole = activations()
    again = {"none": 0, "selective": whole - activations(recompute="selective"), "full": whole}[
        recompute
    ]
    assert stage.activations == 2000 * (kept + again)


@pytest.mark.parametrize(
    ("layout", "stage", "live"),
    [
        ({}, 0, 28),
        ({"pipeline": 4}, 0, 28),
        ({"pipeline": 4}, 3, 7),
        ({"pipeline": 2}, 1, 14),
        ({"pipeline": 2, "virtual_pipeline": 2}, 0, 35),
    ],
)
def test_layers_alive_at_the_fullest_moment(layout, stage, live):
    # Interleaved, first of two stages: 2 x 1 + 1 x 2 chunks ahead and one more, of 7 layers each.
    layers = stage_layers(QWEN2_5_7B, parallel(**layout))[stage]
    assert live_layers(parallel(**layout), stage, layers) == live


def test_no_more_is_alive_than_a_minibatch_has():
    layer = layer_activations(QWEN2_5_7B, parallel(), 1000, 2, fused=True)
    few = replace(LOAD, tokens_per_minibatch=2500)
    assert [stage.activations for stage in plan({"pipeline": 4}, few)] == [
        7 * n * layer // 2 for n in (5, 5, 4, 2)
    ]


@pytest.mark.parametrize(
    ("prompts", "responses", "more", "tokens"),
    [
        (1, 2, [], 2 * 4096),  # at most the whole minibatch
        (5, 2, [], (3 + 1) * 4096),  # 10 sequences on 4 ranks
        (5, 2, ["method=papo"], 2 * (3 + 1) * 4096),  # each of them twice
        (16, 8, [], 65536),
    ],
)
def test_a_microbatch_has_at_most_a_rank_s_share_of_the_minibatch(prompts, responses, more, tokens):
    free = WorkModel(10**12)  # attention costs nothing: work is tokens
    assert tokens_of_8(free, prompts, responses, *more) == tokens


def tokens_of_8(work: WorkModel, prompts: int, responses: int, *more: str) -> int:
    """Most tokens of a micro-batch of 8 ranks in pairs."""
    sizes = [
        "batch.tokens_per_microbatch=65536",
        "parallel.tensor=2",
        f"batch.prompts_per_minibatch={prompts}",
        f"batch.responses_per_prompt={responses}",
    ]
    load = workload(config(*sizes, *more), 8, work=work, fused=True, keep_reference=False)
    return load.tokens_per_microbatch


def test_a_rank_holds_its_share_of_a_step():
    """3 x 5 sequences of 4096 tokens over 8 ranks in pairs: 4 of them at most."""
    sizes = ["parallel.tensor=2", "batch.prompts_per_step=3", "batch.prompts_per_minibatch=1"]
    planned = config(*sizes, "batch.responses_per_prompt=5")
    load = workload(planned, 8, work=WorkModel(10**12), fused=True, keep_reference=False)
    assert load.tokens_per_step == 4 * 4096


def test_a_rank_may_get_more_tokens_of_short_sequences():
    """4 x 4096 tokens whose attention takes a quarter as much again: the work of 20480 tokens."""
    assert tokens_of_8(WorkModel(4 * 4096), 5, 2) == 20480


@pytest.mark.parametrize(
    ("prompts", "responses", "ranks", "multiple"),
    [(1, 7, 4, 1), (3, 5, 2, 1), (4, 8, 8, 2), (5, 2, 4, 1)],
)
@pytest.mark.parametrize("crossover", [1000, 70_454, 10**12])
def test_what_is_planned_bounds_what_is_packed(prompts, responses, ranks, multiple, crossover):
    planned = config(
        f"batch.prompts_per_minibatch={prompts}",
        f"batch.responses_per_prompt={responses}",
        "batch.tokens_per_microbatch=20000",
    )
    model = WorkModel(crossover)
    load = workload(planned, ranks, work=model, fused=True, keep_reference=False)
    most = load.tokens_per_microbatch
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice((20, 500, 4000, 4096)) for _ in range(prompts * responses)]
        sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=20000, multiple=multiple)
        packed = plan_microbatches(lengths, range(len(lengths)), PlanRule(work=model, **sizes))
        for rank in packed:
            for microbatch in rank:
                assert sum(lengths[row] for row in microbatch) <= most


MATRICES = LAYER - 4608 - 2 * 3584  # of a layer: all but its bias and norms


def fp8(**more):
    return {**compose("precision/fp8_tensorwise")["fp8"], **more}


def test_fp8_layers_of_the_policy_keep_two_copies_of_a_byte():
    tp4 = {"tensor": 4}
    assert plan(tp4, fp8=fp8())[0].fp8_copies == 2 * 28 * MATRICES // 4 == 3_262_644_224
    assert plan(tp4)[0].fp8_copies == 0
    assert plan(tp4, fp8=fp8(param_gather=True))[0].fp8_copies == 0, (
        "both forms are the weight, counted as bfloat16"
    )
    ends = fp8(num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)
    stages = plan({"tensor": 2, "pipeline": 4}, fp8=ends)
    assert [stage.fp8_copies for stage in stages] == [layers * MATRICES for layers in (5, 7, 7, 6)]
