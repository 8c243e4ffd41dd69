"""What the engine holds, by hand."""

from dataclasses import replace

from megatron_rl.planning.engine_memory import GIB
from tests.unit.planning_of_7b import EMBEDDING, LAYER, QWEN2_5_7B, of_experts, plan

FIVE_EXPERTS = of_experts(5, layers=1, tied=True)


def test_an_fp8_engine_has_one_byte_for_the_matrices_of_its_layers():
    (stage,) = plan({}, rollout={"tensor": 1, "quantization": "fp8"})
    vectors = 28 * (4608 + 2 * 3584)  # biases and norms
    matrices = 28 * LAYER - vectors
    assert stage.engine_weights == matrices + 2 * (vectors + 2 * EMBEDDING + 3584)


def test_a_sleeping_engine_locks_powers_of_two():
    (stage,) = plan({"tensor": 4})
    mib = 2**20
    # Of the two ranks of the engine. Gate and up 129.5 MiB, down 64.75, queries with keys and
    # values 15.75, output 12.25; the bias has 4.5 KiB, a norm 7. Embedding and head 519.75 MiB
    # each.
    layer = (256 + 128 + 16 + 16) * mib + 3 * 8192
    # The sampler's counts 594 MiB, its bits twice 18.6.
    outer = (2 * 1024 + 1024 + 2 * 32) * mib + 8192
    assert stage.engine_backup == 28 * layer + outer
    assert 14.4 < stage.engine_backup / GIB < 14.5 and stage.engine_weights / GIB < 7.1
    (small,) = plan({"tensor": 4}, rollout={"quantization": "fp8"})
    # One byte for each number of a matrix: 64.75, 32.4, 7.9 and 6.1 MiB.
    assert small.engine_backup == 28 * ((128 + 64 + 8 + 8) * mib + 3 * 8192) + outer


def test_before_they_are_quantized_weights_have_two_bytes():
    (plain,) = plan({})
    (fp8,) = plan({}, rollout={"quantization": "fp8"})
    assert fp8.engine_unquantized == plain.engine_weights > fp8.engine_weights


def test_the_sampler_has_a_number_and_two_bits_for_each_token_of_each_sequence():
    (stage,) = plan({})
    assert stage.engine_sampler == 1024 * (152064 * 4 + 2 * 4752 * 4)
    assert 0.61 < stage.engine_sampler / GIB < 0.62
    (few,) = plan({}, rollout={"max_num_seqs": 64})
    assert 16 * few.engine_sampler == stage.engine_sampler
    (small,) = plan({}, device_gib=48.0)
    assert 4 * small.engine_sampler == stage.engine_sampler
    # A vocabulary that is no multiple of 32 has one more word of bits.
    (odd,) = plan({}, arch=replace(QWEN2_5_7B, vocab_size=33), rollout={"max_num_seqs": 1})
    assert odd.engine_sampler == 33 * 4 + 2 * 8


def test_the_cache_has_what_weights_and_sampler_leave():
    share = {"kv_cache_gib": None, "gpu_memory_utilization": 0.5}
    (stage,) = plan({}, rollout=share)
    assert stage.kv_cache == 40 * GIB - stage.engine_weights - stage.engine_sampler


def test_all_experts_of_a_layer_are_two_tensors_of_the_engine():
    experts = 65536 + 32768  # gate and up 5 x 64 x 64 x 2 bytes = 40960, down 20480
    # Queries, keys and values (64 + 2 x 32) x 64, output 64 x 64, router 5 x 64, two norms of 64,
    # two of 16; embedding; last norm.
    others = 16384 + 8192 + 1024 + 2 * 128 + 2 * 32
    sampler = 1024 * (128 + 2 * 4) * 4
    (stage,) = plan({}, arch=FIVE_EXPERTS, rollout={"tensor": 1})
    assert stage.engine_sampler == sampler
    assert stage.engine_backup == experts + others + 16384 + 128 + 2**19 + 2 * 2**14


def test_stages_have_the_layers_of_the_longest_and_all_have_the_ends() -> None:
    (stage,) = plan({}, rollout={"tensor": 1, "pipeline": 3})
    assert stage.engine_weights == 2 * (10 * LAYER + 2 * EMBEDDING + 3584)
    mib = 2**20
    (two,) = plan({"tensor": 4}, rollout={"pipeline": 2})
    (one,) = plan({"tensor": 4})
    assert one.engine_backup - two.engine_backup == 14 * ((256 + 128 + 16 + 16) * mib + 3 * 8192)


def test_whole_experts_by_hand() -> None:
    (cut,) = plan({}, arch=FIVE_EXPERTS)
    (whole,) = plan({}, arch=FIVE_EXPERTS, rollout={"expert_parallel": True})
    expert = 3 * 64 * 32
    # On two ranks 3 whole ones at most, or a half of each of the 5.
    assert whole.engine_weights - cut.engine_weights == 2 * (3 * expert - 5 * expert // 2)
