"""Weight updates of real vLLM: equal to a fresh engine, every silent fault shown to be one, every
loud one named; and the loop with the Megatron policy."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.numerics.rollout_models import verdict

HERE = Path(__file__).parent
UPDATES = (
    "updated_equals_fresh qwen3",
    "updated_equals_fresh qwen2_tied",
    "updated_equals_fresh llama",
    "updated_equals_fresh qwen3_moe",
    "updated_equals_fresh gemma3",
    "updated_equals_fresh gemma3_yarn",
    "updated_equals_fresh mistral_window",
    "updated_equals_fresh phi3",
    "updated_equals_fresh olmo2",
    "updated_equals_fresh olmo3",
    "updated_equals_fresh glm4_moe",
    "updated_equals_fresh deepseek_v3",
    "updated_equals_fresh moonlight",
    "updated_equals_fresh gpt_oss",
    "updated_equals_fresh qwen3_next",
    "updated_equals_fresh qwen3_5_moe",
    "updated_equals_fresh qwen3_5",
    "updated_equals_fresh qwen3_yarn",
    "filled_by_first_sync qwen3",
    "filled_by_first_sync qwen2_tied",
    "filled_by_first_sync llama",
    "filled_by_first_sync qwen3_moe",
    "filled_by_first_sync gemma3",
    "filled_by_first_sync mistral_window",
    "filled_by_first_sync phi3",
    "filled_by_first_sync olmo2",
    "filled_by_first_sync olmo3",
    "filled_by_first_sync glm4_moe",
    "filled_by_first_sync deepseek_v3",
    "filled_by_first_sync moonlight",
    "filled_by_first_sync gpt_oss",
    "filled_by_first_sync qwen3_next",
    "filled_by_first_sync qwen3_5_moe",
    "filled_by_first_sync qwen3_5",
    "unreached_reads_files qwen3",
    "unpacked_is_wrong qwen2_tied",
    "unpacked_is_wrong qwen3_moe",
    "no_group_has_a_limit",
    "prefix_cache",
    "bf16_engine_takes_float32",
    "not_confirmed",
    "faults",
    "interrupted",
)
BOTH = ("agree tensor", "agree pipeline", "agree data", "agree adapters", "random_state_after_both")


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    return launch(
        HERE / "weight_sync_worker.py",
        nproc=1,
        args=[tmp_path_factory.mktemp("updates")],
        timeout=280,
    ).stdout


@pytest.fixture(scope="module")
def both_engines(tmp_path_factory):
    return launch(
        HERE / "both_engines_worker.py", args=[tmp_path_factory.mktemp("both")], timeout=280
    ).stdout


@pytest.mark.full
@pytest.mark.parametrize("name", UPDATES)
def test_update(updates, name):
    assert not verdict(updates, name), verdict(updates, name)


@pytest.mark.parametrize("name", BOTH)
def test_policy_and_engine(both_engines, name):
    assert not verdict(both_engines, name, ranks=2), verdict(both_engines, name, ranks=2)
