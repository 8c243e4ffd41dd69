from dataclasses import replace

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, ParallelConfig, PrecisionConfig, RolloutConfig
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
SIZES = memory.Sizes(world_size=8, tokens_per_microbatch=1000, logprob_chunk_tokens=256, make_vocab_divisible_by=1, fused=True)


def parallel(**layout):
    return ParallelConfig(**{**compose("parallel/single"), "distributed_optimizer": False, **layout})


def plan(layout, sizes=SIZES, arch=QWEN2_5_7B, gpu_gib=80.0, rollout=None):
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "stop": (), "tensor": 2, "kv_cache_gib": 3.0, **(rollout or {})})
    precision = PrecisionConfig(**{**compose("precision/bf16"), "params": "bfloat16", "grad_reduce_in_float32": True})
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


def config(*overrides):
    return validate(Config, compose("config", ["model.path=m", "data.train=t", "data.eval=e", *overrides]), "test")


GPU = memory.Room("cuda", 80.0)


def test_what_does_not_fit_is_named_with_its_key_and_value():
    messages = memory.problems(plan({}), config(), GPU)
    assert [message.split(" needs ")[0] for message in messages] == ["training", "weight sync", "generation"]
    assert all("pipeline stage 0, there are 80.0 GiB" in message for message in messages)
    assert "most of it is optimizer (85.1 GiB): use parallel.distributed_optimizer=true (now True)" in messages[0]
    assert all("add optimizer to memory.offload (now ())" in message for message in messages[1:])
    away = config("memory.offload=[optimizer,gradients]")
    assert [message.split()[0] for message in memory.problems(plan({}), away, GPU)] == ["training"]
    fits = plan({"tensor": 4, "distributed_optimizer": True})
    assert memory.problems(fits, config(), GPU) == []


def test_an_engine_that_never_sleeps_stays_beside_training():
    large = plan({"tensor": 4, "distributed_optimizer": True}, rollout={"kv_cache_gib": 50.0})
    awake, asleep = (memory.problems(large, config(f"rollout.sleep_level={level}"), GPU) for level in (0, 1))
    assert [message.split(" needs ")[0] for message in awake] == ["training", "weight sync", "generation"]
    assert [message.split(" needs ")[0] for message in asleep] == ["generation"]


def test_phases_follow_the_hand_over():
    lean = config("memory.offload=[optimizer,gradients,weights]", "rollout.sleep_level=1")
    found = memory.phases(lean, "cuda")
    assert found["training"] == ("weights", "gradients", "optimizer", "activations", "logits")
    assert found["weight sync"] == ("weights", "engine_weights"), "the sync reads the weights, which leave after it"
    assert found["generation"] == ("engine_weights", "kv_cache")
    assert found["host copies"] == ("reference", "weights", "optimizer", "engine_weights")
    assert memory.phases(config("rollout.sleep_level=2"), "cuda")["host copies"] == ("reference",)


def test_copies_on_the_host_are_compared_with_its_memory():
    stages = plan({}, replace(SIZES, keep_reference=True))
    assert stages[0].reference == stages[0].weights
    lean = config("memory.offload=[optimizer]")
    roomy = memory.Room("cuda", 1000.0, 150.0)
    assert memory.problems(stages, lean, roomy) == []
    (message,) = memory.problems(stages, lean, replace(roomy, host_gib=50.0))
    # The reference and the engine's sleeping weights (7.1 of its two ranks' 14.2) beside 85.1 of the optimizer.
    assert "host copies needs 106.4 GiB" in message and "take optimizer out of memory.offload (now ('optimizer',))" in message


def test_on_a_cpu_everything_is_held_at_once_and_what_is_offloaded_twice():
    (stage,) = plan({})
    room = memory.Room("cpu", 8.0)
    (one,) = memory.demands([stage], config(), room)
    (two,) = memory.demands([stage], config("memory.offload=[weights,gradients]", "rollout.sleep_level=2"), room)
    names = ("weights", "gradients", "optimizer", "activations", "logits", "engine_weights", "kv_cache")
    assert one.need_gib == pytest.approx(sum(getattr(stage, name) for name in names) / memory.GIB + memory.OVERHEAD_GIB["cpu"])
    assert two.need_gib - one.need_gib == pytest.approx(stage.weights / memory.GIB)


def test_the_plan_is_one_line():
    line = memory.describe(plan({"tensor": 4, "distributed_optimizer": True}), config(), memory.Room("cuda", 79.1, 100.0))
    assert "\n" not in line
    assert "(pipeline stage 0): weights 3.55, gradients 7.09, optimizer 10.64, activations 2.09, logits 0.54, engine weights 7.09" in line
    assert "training 27.91 of 79.10, weight sync 32.37 of 79.10, generation 35.37 of 79.10, host copies 7.09 of 100.00" in line


def test_a_share_of_the_device_that_leaves_no_cache_is_named():
    stages = plan({"tensor": 4, "distributed_optimizer": True}, gpu_gib=11.0, rollout={"kv_cache_gib": None, "gpu_memory_utilization": 0.6})
    assert stages[0].kv_cache == 0
    message = memory.problems(stages, config(), memory.Room("cuda", 11.0))[0]
    assert message.startswith("rollout.gpu_memory_utilization = 0.6: of 11.0 GiB it leaves nothing for keys and values beside 7.1 GiB")
