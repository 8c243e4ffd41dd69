"""Router replay of the rollout in the real trainer: 8 experts, two updates a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_mismatch import SETTINGS, table_of
from tests.e2e.test_partial import PARTIAL
from tests.e2e.toy import overrides, untimed_rows, write_data, write_experts
from tests.e2e.turns import write_turns
from tests.launch import REPO, launch

pytestmark = pytest.mark.full
BOUND = 1e-5  # nats of one token; both sides compute in float32
NOISE = ("--plugin", str(REPO / "tests/e2e/noisy_router.py"))
DATA_PARALLEL = ("parallel=single", "rollout.tensor=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    write_experts(path / "model")
    write_data(path / "data.jsonl")
    return path


def train(folder: Path, name: str, *more: str, plugin: tuple[str, ...] = ()) -> list[dict]:
    """The rows of the steps, two where ``more`` says nothing else."""
    steps = ("trainer.num_steps=2", "rollout.max_response_tokens=8", "evaluation.at_start=false")
    words = overrides(folder, folder / name, *steps, "optim.learning_rate=1e-3", *more)
    launch("megatron_rl.train", 2, [*plugin, *words], timeout=400)
    return [row for row in untimed_rows(folder / name) if "policy/ratio_max" in row]


TURNS = ("env.name=letters", "reward.max_excluded_share=0.5", "rollout.max_response_tokens=48")


@pytest.mark.parametrize("turns", [(), TURNS])
def test_noise_of_the_policy_s_routers_is_no_gap(
    folder: Path, tmp_path: Path, turns: tuple[str, ...]
) -> None:
    gaps = {}
    plugin = NOISE
    if turns:
        folder = write_turns(tmp_path, write_experts)
        plugin = (*NOISE, "--plugin", str(folder / "letters.py"))
    for replay in ("none", "rollout"):
        # Sequences that the engine did not sample are routed live, with the noise.
        free = ("weight_sync.logprob_check_every=0", "mismatch_limits.abort_above=null")
        settings = (*DATA_PARALLEL, *free, f"rollout.router_replay={replay}", *turns)
        first, _ = train(folder, replay, *settings, plugin=plugin)
        assert not turns or first["environment/turns"] > 2
        gaps[replay] = first["mismatch/logprob_abs_diff_mean"]
    assert gaps["none"] >= 10 * gaps["rollout"] > 0


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("parallel.sequence=true",), id="tensor"),
        pytest.param(("parallel=pp2", "rollout.tensor=1"), id="pipeline"),
    ],
)
def test_the_policy_scores_what_was_sampled(folder: Path, more: tuple[str, ...]) -> None:
    exact = (f"mismatch_limits.abort_above={BOUND}", "rollout.router_replay=rollout")
    for row in train(folder, f"exact{len(more)}", *exact, *more):
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert row["policy/ratio_max"] > 1, "the second update has moved"


def test_parts_of_responses_go_on_with_their_experts(folder: Path) -> None:
    """The first step has tokens of its own weights alone, later ones some of those before."""
    replayed = ("rollout.router_replay=rollout", *PARTIAL)
    first, *later = train(folder, "partial", *DATA_PARALLEL, *replayed)
    assert first["mismatch/logprob_abs_diff_max"] <= BOUND
    assert any(row["source/mixed_share"] > 0 for row in later)


def test_the_microscope_switches_the_replay(folder: Path) -> None:
    """An engine in 16 bits chooses other experts; without them the policy would be further away.
    The parts still add up to the gap that the run has logged."""
    more = ("rollout.dtype=bfloat16", "rollout.router_replay=rollout")
    one_update = "batch.prompts_per_minibatch=8"
    causes, _, row = table_of(folder, "microscope", 1, *SETTINGS, *more, *DATA_PARALLEL, one_update)
    size, mean = causes["all"]
    assert size == pytest.approx(row["mismatch/logprob_abs_diff_mean"], rel=0.01)
    parts = ("decoding", "engine in 16 bits", "implementation")
    assert sum(causes[part][1] for part in parts) == pytest.approx(mean, abs=0.01 * size)
    assert causes["router"][0] > 0.1 * size
