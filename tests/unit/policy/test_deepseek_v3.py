"""DeepSeek-V3 without megatron: sizes of the published model, what an engine keeps of a token, and
what does not go with latent attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megatron_rl.config.rules.engine_checks import token_bytes
from megatron_rl.config.rules.hardware import Machine, engine_problems
from megatron_rl.models import read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.problems import family_problems
from megatron_rl.planning.parameter_counts import is_trained, stage_counts
from tests import zoo
from tests.numerics.policy_cases import parallel
from tests.numerics.rollout_models import engine_config
from tools.plan_sync import architecture


def test_parameters_of_the_published_model() -> None:
    """Counted by hand from Tables 1 and 2 of arXiv:2412.19437, without the layer for further
    tokens: hidden 7168, 128 heads of 128 + 64, latent vectors of 1536 and 512 + 64, 256 experts and
    a shared one of 2048 in 58 layers, 3 of 18432."""
    hidden, expert, heads = 7168, 3 * 7168 * 2048, 128
    queries = hidden * 1536 + 1536 + 1536 * heads * 192
    attention = queries + hidden * 576 + 512 + 512 * heads * 256 + heads * 128 * hidden
    dense = 3 * (attention + 2 * hidden + 3 * hidden * 18432)
    sparse = 58 * (attention + 2 * hidden + 257 * expert + 256 * hidden + 256)
    (counts,) = stage_counts(architecture("deepseek-v3"), parallel(), 1)
    assert counts.total == dense + sparse + 2 * 129280 * hidden + hidden == 671_026_419_200


def test_kimi_k2_is_read_by_its_own_name(tmp_path: Path) -> None:
    """1.03 T parameters by hand: 64 heads, 384 experts and a shared one in 60 of 61 layers."""
    hidden, expert, heads = 7168, 3 * 7168 * 2048, 64
    queries = hidden * 1536 + 1536 + 1536 * heads * 192
    attention = queries + hidden * 576 + 512 + 512 * heads * 256 + heads * 128 * hidden
    dense = attention + 2 * hidden + 3 * hidden * 18432
    sparse = 60 * (attention + 2 * hidden + 385 * expert + 384 * hidden + 384)
    (counts,) = stage_counts(architecture("kimi-k2"), parallel(), 1)
    assert counts.total == dense + sparse + 2 * 163840 * hidden + hidden == 1_026_408_232_448
    path = zoo.save_tiny_model("moonlight", tmp_path / "model")
    arch, _ = read_architecture(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    again, hf = read_architecture(path)
    assert (again, hf.model_type) == (arch, "kimi_k2")


def test_an_engine_keeps_one_latent_vector_of_a_token() -> None:
    """On every tensor rank; heads of their own would be 2 * 128 * 192 numbers in place of 576."""
    rollout = engine_config(dtype="bfloat16", tensor=8)
    assert token_bytes(rollout, architecture("deepseek-v3")) == 61 * 576 * 2


def test_adapters_of_the_published_model() -> None:
    """By hand, rank 16: q_a, q_b, kv_a, kv_b, o, of 61 layers; beside a matrix that each tensor
    rank has whole, to latent vectors, A and B are whole too."""
    lora = zoo.model_config(Path("m"), lora={"rank": 16, "targets": ["attention"]}).lora
    arch = with_adapters(architecture("deepseek-v3"), lora)
    which = partial(is_trained, arch=arch, freeze_vision=False)
    inner = 7168 + 1536, 1536 + 24576, 7168 + 576, 512 + 32768, 16384 + 7168
    (alone,) = stage_counts(arch, parallel(), 1, which)
    assert alone.total == 61 * 16 * sum(inner) == 97_006_592
    (rank,) = stage_counts(arch, parallel(tensor=8, sequence=True), 1, which)
    cut = 7168 + 1536, 1536 + 24576 // 8, 7168 + 576, 512 + 32768 // 8, 16384 // 8 + 7168
    assert rank.total == 61 * 16 * sum(cut)


def test_what_is_refused_with_latent_attention(tmp_path: Path) -> None:
    path = zoo.save_tiny_model("moonlight", tmp_path / "model")
    arch = read_architecture(path)[0]
    run = zoo.configured(path, "precision=fp8_tensorwise")
    problems = family_problems(arch, run.model, run.parallel, run.precision)
    assert any("FP8 has not been tried with latent attention" in one for one in problems)
    cpu = Machine(compute_capability=None, transformer_engine=None, adam="torch")
    problem = next(engine_problems(engine_config(), cpu, arch))
    assert problem.startswith("model.path: kv_lora_rank + qk_rope_head_dim = 40: without a GPU")


def test_a_router_that_vllm_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    path = zoo.save_tiny_model("deepseek_v3", tmp_path / "model")
    config = path / "config.json"
    config.write_text(config.read_text().replace('"scoring_func"', '"other"'))
    with pytest.raises(ValueError, match="scoring_func is absent"):
        read_architecture(path)
