import random
from dataclasses import replace

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.data.packing import plan_microbatches
from megatron_rl.policy import memory
from megatron_rl.policy.families import architecture_from

QWEN2_5_7B = architecture_from(
    Qwen2Config(
        hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=28, intermediate_size=18944, vocab_size=152064,
        max_position_embeddings=32768, tie_word_embeddings=False,
    ),
    "Qwen2ForCausalLM",
)  # fmt: skip
# Embedding and head 2 x 152064 x 3584; a layer: (3584 + 2 x 512) x 3584 + 4608 + 3584^2 + 3 x 3584 x 18944 + 2 x 3584; last norm 3584.
LAYER, EMBEDDING = 233_057_792, 544_997_376
PARAMETERS = 28 * LAYER + 2 * EMBEDDING + 3584
SIZES = memory.Sizes(
    world_size=8, tokens_per_microbatch=1000, tokens_per_minibatch=10**6, logprob_chunk_tokens=256, make_vocab_divisible_by=1, fused=True
)  # fmt: skip


def parallel(**layout):
    return ParallelConfig(**{**compose("parallel/single"), "distributed_optimizer": False, **layout})


def plan(layout, sizes=SIZES, arch=QWEN2_5_7B, gpu_gib=80.0, rollout=None, fp8=None):
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "stop": (), "tensor": 2, "kv_cache_gib": 3.0, **(rollout or {})})
    precision = PrecisionConfig(**{**compose("precision/bf16"), "params": "bfloat16", "grad_reduce_in_float32": True, "fp8": fp8})
    return memory.plan(arch, parallel(**layout), precision, rollout, sizes, gpu_gib)


def test_one_rank_of_a_7b_model():
    (stage,) = plan({})
    assert PARAMETERS == 7_615_616_512
    assert (stage.weights, stage.gradients, stage.optimizer) == (2 * PARAMETERS, 4 * PARAMETERS, 12 * PARAMETERS)
    assert stage.logits == 4 * 152064 * (256 + 3584)
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
    assert [stage.weights for stage in stages] == [2 * (n * LAYER + end) for n, end in zip(layers, ends, strict=True)]
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_a_tied_head_is_one_parameter_on_one_stage_and_a_copy_on_two():
    tied = replace(QWEN2_5_7B, tied_embeddings=True)
    assert plan({}, arch=tied)[0].weights == 2 * (PARAMETERS - EMBEDDING)
    assert sum(stage.weights for stage in plan({"pipeline": 2}, arch=tied)) == 2 * PARAMETERS


def test_experts_are_divided_by_expert_ranks():
    config = Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=128, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    arch = architecture_from(config, "Qwen3MoeForCausalLM")
    one, four = plan({}, arch=arch)[0].weights, plan({"expert": 4}, arch=arch)[0].weights
    assert one - four == 2 * 2 * (8 - 2) * 3 * 64 * 32  # bytes x layers x experts elsewhere x (gate, up, down)


def test_activations():
    # 1000 tokens, 2 bytes: norms 4 x 3584; queries and output 2 x 28 heads, keys and values 2 x 4 heads, of 128; 5 x 18944.
    assert memory.layer_activations(QWEN2_5_7B, parallel(), 1000, 2, fused=True) == 2000 * (4 * 3584 + 64 * 128 + 5 * 18944)
    assert memory.layer_activations(QWEN2_5_7B, parallel(tensor=4), 1000, 2, fused=True) == 2000 * (4 * 3584 + 16 * 128 + 5 * 4736)
    split = parallel(tensor=4, sequence=True)
    assert memory.layer_activations(QWEN2_5_7B, split, 1000, 2, fused=True) == 2000 * (3584 + 16 * 128 + 5 * 4736)
    assert memory.layer_activations(QWEN2_5_7B, parallel(recompute="full"), 1000, 2, fused=True) == 2000 * 3584


@pytest.mark.parametrize(
    ("layout", "stage", "live"),
    [
        ({}, 0, 28), ({"pipeline": 4}, 0, 28), ({"pipeline": 4}, 3, 7), ({"pipeline": 2}, 1, 14),
        ({"pipeline": 2, "virtual_pipeline": 2}, 0, 35),
    ],
)  # fmt: skip
def test_layers_alive_at_the_fullest_moment(layout, stage, live):
    # Interleaved, first of two stages: 2 x 1 + 1 x 2 chunks ahead and one more, of 7 layers each.
    layers = memory.stage_layers(QWEN2_5_7B, parallel(**layout))[stage]
    assert memory.live_layers(parallel(**layout), stage, layers) == live


def test_no_more_is_alive_than_a_minibatch_has():
    layer = memory.layer_activations(QWEN2_5_7B, parallel(), 1000, 2, fused=True)
    few = replace(SIZES, tokens_per_minibatch=2500)
    assert [stage.activations for stage in plan({"pipeline": 4}, few)] == [7 * n * layer // 2 for n in (5, 5, 4, 2)]


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["batch.prompts_per_minibatch=1", "batch.responses_per_prompt=2"], 2 * 4096),  # at most the whole minibatch
        (["batch.prompts_per_minibatch=5", "batch.responses_per_prompt=2"], (3 + 1) * 4096),  # 10 sequences on 4 ranks
        (["batch.prompts_per_minibatch=16", "batch.responses_per_prompt=8"], 65536),
    ],
)
def test_a_microbatch_has_at_most_a_rank_s_share_of_the_minibatch(overrides, tokens):
    of_8 = config("batch.tokens_per_microbatch=65536", "parallel.tensor=2", *overrides)
    assert memory.sizes(of_8, 8, fused=True, keep_reference=False).tokens_per_microbatch == tokens


@pytest.mark.parametrize(("prompts", "responses", "ranks", "multiple"), [(1, 7, 4, 1), (3, 5, 2, 1), (4, 8, 8, 2), (5, 2, 4, 1)])
def test_what_is_planned_bounds_what_is_packed(prompts, responses, ranks, multiple):
    planned = config(
        f"batch.prompts_per_minibatch={prompts}", f"batch.responses_per_prompt={responses}", "batch.tokens_per_microbatch=20000"
    )
    most = memory.sizes(planned, ranks, fused=True, keep_reference=False).tokens_per_microbatch
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice((20, 500, 4000, 4096)) for _ in range(prompts * responses)]
        sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=20000, multiple=multiple)
        packed = plan_microbatches(lengths, range(len(lengths)), **sizes)
        assert max(sum(lengths[row] for row in microbatch) for rank in packed for microbatch in rank) <= most


def test_an_fp8_engine_has_one_byte_for_the_matrices_of_its_layers():
    (stage,) = plan({}, rollout={"tensor": 1, "quantization": "fp8"})
    vectors = 28 * (4608 + 2 * 3584)  # biases and norms
    matrices = 28 * LAYER - vectors
    assert stage.engine_weights == matrices + 2 * (vectors + 2 * EMBEDDING + 3584)


MATRICES = LAYER - 4608 - 2 * 3584  # of a layer: all but its bias and norms


def fp8(**more):
    return {**compose("precision/fp8_tensorwise")["fp8"], **more}


def test_fp8_layers_of_the_policy_keep_two_copies_of_a_byte():
    tp4 = {"tensor": 4}
    assert plan(tp4, fp8=fp8())[0].fp8_copies == 2 * 28 * MATRICES // 4 == 3_262_644_224
    assert plan(tp4)[0].fp8_copies == 0
    assert plan(tp4, fp8=fp8(param_gather=True))[0].fp8_copies == 0, "both forms are the weight, counted as bfloat16"
    ends = fp8(num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)
    stages = plan({"tensor": 2, "pipeline": 4}, fp8=ends)
    assert [stage.fp8_copies for stage in stages] == [layers * MATRICES for layers in (5, 7, 7, 6)]


def test_a_sleeping_engine_locks_powers_of_two():
    (stage,) = plan({"tensor": 4})
    mib = 2**20
    # Of the two ranks of the engine. Gate and up 129.5 MiB, down 64.75, queries with keys and values 15.75, output 12.25; the bias has
    # 4.5 KiB, a norm 7. Embedding and head 519.75 MiB each.
    layer = (256 + 128 + 16 + 16) * mib + 3 * 8192
    assert stage.engine_backup == 28 * layer + 2 * 1024 * mib + 8192
    assert 13.3 < stage.engine_backup / memory.GIB < 13.4 and stage.engine_weights / memory.GIB < 7.1
    (small,) = plan({"tensor": 4}, rollout={"quantization": "fp8"})
    # One byte for each number of a matrix: 64.75, 32.4, 7.9 and 6.1 MiB.
    assert small.engine_backup == 28 * ((128 + 64 + 8 + 8) * mib + 3 * 8192) + 2 * 1024 * mib + 8192


def test_all_experts_of_a_layer_are_two_tensors_of_the_engine():
    config = Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1, vocab_size=128, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip
    arch = architecture_from(config, "Qwen3MoeForCausalLM")
    experts = 65536 + 32768  # gate and up 5 x 64 x 64 x 2 bytes = 40960, down 20480
    # Queries, keys and values (64 + 2 x 32) x 64, output 64 x 64, router 5 x 64, two norms of 64, two of 16; embedding; last norm.
    others = 16384 + 8192 + 1024 + 2 * 128 + 2 * 32
    assert plan({}, arch=arch, rollout={"tensor": 1})[0].engine_backup == experts + others + 16384 + 128


def test_a_checkpoint_gathers_a_distributed_optimizer():
    one, four = plan({"distributed_optimizer": True})[0], plan({"distributed_optimizer": True, "tensor": 4})[0]
    assert one.whole_optimizer == 12 * PARAMETERS and plan({})[0].whole_optimizer == 0
    assert four.whole_optimizer == 12 * four.weights // 2
    lean = config("memory.offload=[optimizer]", "rollout.sleep_level=2")
    kept = replace(four, reference=10**9)
    by_phase = {one.phase: one for one in memory.demands([kept], lean, replace(GPU, host_gib=30.0))}
    assert by_phase["host copies"].need_gib == pytest.approx((10**9 + four.optimizer) / memory.GIB)
    # The reference a second time, to be written.
    assert by_phase["checkpoint"].need_gib == pytest.approx((2 * 10**9 + four.optimizer + four.whole_optimizer) / memory.GIB)
    (message,) = memory.problems([kept], lean, replace(GPU, host_gib=30.0))
    assert message.startswith("checkpoint needs 33.8 GiB") and "most of it is whole_optimizer (21.3 GiB): take optimizer out" in message
    assert "raise parallel.tensor (now 1), or raise parallel.pipeline (now 1)" in message


def test_a_32b_fp8_engine_on_one_gpu_is_not_refused():
    large = replace(QWEN2_5_7B, hidden_size=5120, num_heads=40, num_kv_heads=8, num_layers=64, ffn_hidden_size=27648, head_dim=128)
    run = config("memory.offload=[optimizer,gradients,weights]")

    def found(quantization):
        rollout = {"tensor": 1, "kv_cache_gib": None, "quantization": quantization}
        stages = plan({"tensor": 8, "distributed_optimizer": True}, replace(SIZES, world_size=16), large, rollout=rollout)
        return memory.problems(stages, run, GPU)

    assert found("fp8") == []
    assert "leaves nothing for keys and values" in found(None)[0]


def config(*overrides):
    return validate(Config, compose("config", ["model.path=m", "data.train=t", "data.eval=e", *overrides]), "test")


GPU = memory.Room("cuda", 80.0)


def test_what_does_not_fit_is_named_with_its_key_and_value():
    messages = memory.problems(plan({}), config("parallel.distributed_optimizer=false"), GPU)
    assert [message.split(" needs ")[0] for message in messages] == ["training", "weight sync", "generation"]
    assert all("pipeline stage 0, there are 80.0 GiB" in message for message in messages)
    assert "most of it is optimizer (85.1 GiB): set parallel.distributed_optimizer=true, or raise parallel.tensor (now 1)" in messages[0]
    assert "add gradients, optimizer to memory.offload (now ())" in messages[1]
    assert "add weights, gradients, optimizer to memory.offload (now ())" in messages[2]
    away = config("memory.offload=[optimizer,gradients]")
    assert [message.split()[0] for message in memory.problems(plan({}), away, GPU)] == ["training"]
    fits = plan({"tensor": 4, "distributed_optimizer": True})
    assert memory.problems(fits, config(), GPU) == []


def remedies(phase, largest, *overrides):
    """What is advised to a run of ``overrides`` whose ``phase`` lacks room, most of it for ``largest``."""
    run = config(*overrides)
    stage = replace(plan({})[0], **{largest: 10**12})
    (message,) = [text for text in memory.problems([stage], run, replace(GPU, host_gib=10.0)) if text.startswith(phase)]
    assert f"most of it is {largest} (" in message
    return message.partition("GiB): ")[2].split(", or ")


TP2 = ("parallel.tensor=2", "parallel.sequence=true")
SHORT = "lower rollout.max_response_tokens (now 3072) and batch.tokens_per_microbatch (now 4096)"
FP8_PARAMS = ("precision=fp8_tensorwise", "precision.fp8.param_gather=true")


@pytest.mark.parametrize(
    ("phase", "largest", "overrides", "advised"),
    [
        (
            "training", "activations", ["parallel.tensor=2", "batch.tokens_per_microbatch=9000"],
            ["lower batch.tokens_per_microbatch (now 9000)", "set parallel.sequence=true",
             "set parallel.recompute=full (now none)", "raise parallel.context (now 1)"],
        ),
        (  # sequence and full recomputation are in use already; a micro-batch has to hold one sequence
            "training", "activations", [*TP2, "parallel.recompute=full", "batch.tokens_per_microbatch=4096"],
            [SHORT, "raise parallel.context (now 1)"],
        ),
        (  # sequence parallelism needs tensor parallelism
            "training", "activations", ["parallel.recompute=full", "batch.tokens_per_microbatch=4096"],
            [SHORT, "raise parallel.context (now 1)"],
        ),
        (
            "training", "optimizer", ["rollout.sleep_level=0"],
            ["set rollout.sleep_level=2 (now 0), so that the engine leaves while the policy trains", "use more data-parallel ranks",
             "raise parallel.tensor (now 1)", "raise parallel.pipeline (now 1)"],
        ),
        (
            "generation", "kv_cache", [],
            ["add weights, gradients, optimizer to memory.offload (now ())", "lower rollout.gpu_memory_utilization (now 0.6)"],
        ),
        (
            "generation", "kv_cache", ["memory.offload=[optimizer,gradients,weights]", "rollout.kv_cache_gib=9.0"],
            ["lower rollout.kv_cache_gib (now 9.0)"],
        ),
        (  # checks.py refuses to offload FP8 weights
            "generation", "kv_cache", [*FP8_PARAMS, "memory.offload=[optimizer]"],
            ["add gradients to memory.offload (now ('optimizer',))", "lower rollout.gpu_memory_utilization (now 0.6)"],
        ),
        (
            "host copies", "optimizer", ["memory.offload=[optimizer,gradients]", "rollout.sleep_level=1"],
            ["take optimizer out of memory.offload (now ('optimizer', 'gradients'))",
             "set rollout.sleep_level=2 (now 1), which drops the engine's weights"],
        ),
    ],
)  # fmt: skip
def test_advised_is_what_is_allowed_and_not_done_yet(phase, largest, overrides, advised):
    assert remedies(phase, largest, *overrides) == advised


def test_an_engine_that_never_sleeps_stays_beside_training():
    large = plan({"tensor": 4, "distributed_optimizer": True}, rollout={"kv_cache_gib": 50.0})
    awake, asleep = (memory.problems(large, config(f"rollout.sleep_level={level}"), GPU) for level in (0, 1))
    assert [message.split(" needs ")[0] for message in awake] == ["training", "weight sync", "generation"]
    assert [message.split(" needs ")[0] for message in asleep] == ["generation"]


def test_phases_follow_the_hand_over():
    lean = config("memory.offload=[optimizer,gradients,weights]", "rollout.sleep_level=1")
    found = memory.phases(lean, "cuda")
    assert found["training"] == ("weights", "gradients", "optimizer", "fp8_copies", "activations", "logits")
    assert found["weight sync"] == ("weights", "engine_weights"), "the sync reads the weights, which leave after it"
    assert found["generation"] == ("engine_weights", "kv_cache")
    assert found["host copies"] == ("reference", "weights", "optimizer", "engine_backup")
    assert found["checkpoint"] == (*found["host copies"], "reference", "whole_optimizer")
    assert memory.phases(config("rollout.sleep_level=2"), "cuda")["host copies"] == ("reference",)


@pytest.mark.parametrize(
    ("offload", "held"),
    [("[]", ("weight sync", "generation")), ("[weights]", ("weight sync",)), ("[gradients]", ()), ("[gradients,weights]", ())],
)
def test_fp8_copies_leave_with_the_first_part(offload, held):
    found = memory.phases(config(f"memory.offload={offload}"), "cuda")
    assert tuple(phase for phase in ("weight sync", "generation") if "fp8_copies" in found[phase]) == held


def test_what_a_sleeping_engine_keeps_counts_on_the_device():
    (stage,) = plan({"tensor": 4, "distributed_optimizer": True}, rollout={"kv_cache_gib": 50.0})
    room = memory.Room("cuda", 80.0, 100.0)
    beside = {one.phase: one.need_gib - memory.needed_gib(stage, one.parts) for one in memory.demands([stage], config(), room)}
    device, host = memory.OVERHEAD_GIB["cuda"] + memory.ENGINE_KEEPS_GIB["cuda"], 0.0
    want = {"training": device, "weight sync": device, "generation": device, "host copies": host, "checkpoint": host}
    assert beside == pytest.approx(want)


def test_copies_on_the_host_are_compared_with_its_memory():
    stages = plan({}, replace(SIZES, keep_reference=True))
    assert stages[0].reference == stages[0].weights
    lean = config("memory.offload=[optimizer]", "rollout.sleep_level=1")
    roomy = memory.Room("cuda", 1000.0, 150.0)
    assert memory.problems(stages, lean, roomy) == []
    message, at_checkpoints = memory.problems(stages, lean, replace(roomy, host_gib=50.0))
    assert at_checkpoints.startswith("checkpoint needs ")
    # The reference (14.2) and the engine's sleeping weights (13.4 locked for 7.1 of its two ranks' 14.2) beside 85.1 of the optimizer.
    assert "host copies needs 112.7 GiB" in message and "take optimizer out of memory.offload (now ('optimizer',))" in message


def test_on_a_cpu_everything_is_held_at_once_and_what_is_offloaded_twice():
    (stage,) = plan({})
    room = memory.Room("cpu", 8.0)
    (one,) = memory.demands([stage], config(), room)
    (two,) = memory.demands([stage], config("memory.offload=[weights,gradients]", "rollout.sleep_level=2"), room)
    names = ("weights", "gradients", "optimizer", "activations", "logits", "engine_weights", "kv_cache")
    assert one.need_gib == pytest.approx(sum(getattr(stage, name) for name in names) / memory.GIB + memory.OVERHEAD_GIB["cpu"])
    assert two.need_gib - one.need_gib == pytest.approx(stage.weights / memory.GIB)


def test_the_plan_is_one_line():
    stages = plan({"tensor": 4, "distributed_optimizer": True})
    line = memory.describe(stages, config("rollout.sleep_level=1"), memory.Room("cuda", 79.1, 100.0))
    assert "\n" not in line
    assert "(pipeline stage 0): weights 3.55, gradients 7.09, optimizer 10.64, activations 2.09, logits 0.54, engine weights 7.09" in line
    assert "training 28.91 of 79.10, weight sync 33.37 of 79.10, generation 36.37 of 79.10" in line
    assert "host copies 13.38 of 100.00, checkpoint 34.66 of 100.00" in line


def test_a_share_of_the_device_that_leaves_no_cache_is_named():
    stages = plan({"tensor": 4, "distributed_optimizer": True}, gpu_gib=11.0, rollout={"kv_cache_gib": None, "gpu_memory_utilization": 0.6})
    assert stages[0].kv_cache == 0
    message = memory.problems(stages, config(), memory.Room("cuda", 11.0))[0]
    assert message.startswith("rollout.gpu_memory_utilization = 0.6: of 11.0 GiB it leaves nothing for keys and values beside 7.1 GiB")
