"""Two runs of one seed are a pair: whatever the method, the same prompts in the same order, and the
same responses in the first step. The real trainer and loader, a bandit for policy and engine."""

from pathlib import Path

import pytest

from megatron_rl.config.load import compose, conf_dir
from megatron_rl.data.loader import PromptLoader
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.runs import build_bandit, samples

CHOSEN = ("grpo", "a_grae", "mapo", "gspo", "rloo", "reinforce_pp")
NEEDED = ("model.path=m", "data.train=t", "data.eval=e")
NUM_RESPONSES = 8
ALL = f"logging.log_samples={10 * NUM_RESPONSES * 4}"


def seen(folder: Path, method: str, *overrides: str, seed: int = 1) -> dict[int, list[str]]:
    """The prompts that each step trained on, in their order."""
    run = "-".join([method, str(seed), *overrides]).replace("=", "-")
    trainer = build_bandit(folder, ALL, f"seed={seed}", *overrides, method=method, run=run)
    trainer.run()
    steps: dict[int, list[str]] = {}
    for row in samples(trainer):
        steps.setdefault(row["step"], []).append(row["prompt"])
    return {step: list(dict.fromkeys(uids)) for step, uids in steps.items()}


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "method").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_method_sets_nothing_that_decides_prompts_or_weights(path):
    """Such as data, batch sizes, seed or model: its file reaches its own section alone."""
    assert "@package" not in path.read_text(encoding="utf-8")


def test_choosing_a_method_changes_its_section_alone():
    plain = compose("config", NEEDED)
    other = compose("config", [*NEEDED, "method=a_grae"])
    assert plain.pop("method") != other.pop("method")
    assert plain == other


def test_equal_seeds_give_equal_prompts_in_every_step(tmp_path):
    orders = [seen(tmp_path, method) for method in CHOSEN]
    assert sorted(orders[0]) == [1, 2, 3] and all(len(uids) == 4 for uids in orders[0].values())
    assert all(order == orders[0] for order in orders)
    assert seen(tmp_path, "grpo", seed=2) != orders[0]


def test_the_first_step_has_the_same_responses(tmp_path):
    """The weights are the same there; from then on the methods go their own ways."""
    steps: dict[str, dict[int, list[str]]] = {}
    for method in ("grpo", "nsr"):
        trainer = build_bandit(tmp_path, ALL, method=method, run=method)
        trainer.run()
        steps[method] = {}
        for row in samples(trainer):
            steps[method].setdefault(row["step"], []).append(row["response"])
    assert len(steps["grpo"][1]) == 4 * NUM_RESPONSES
    assert steps["grpo"][1] == steps["nsr"][1]
    assert steps["grpo"][3] != steps["nsr"][3]


def test_dynamic_sampling_leaves_the_pair_where_it_first_discards_a_group(tmp_path):
    """It takes prompts in the same order, but passes over some, which the other run trains on."""
    two = "batch.responses_per_prompt=2"
    grpo = seen(tmp_path, "grpo", two)
    assert grpo == seen(tmp_path, "grpo"), "the number of responses has no part in the order"
    dapo = build_bandit(
        tmp_path,
        ALL,
        two,
        "trainer.num_steps=1",
        method="dapo",
        method_overrides=["reward_shaping.overlong=null"],
    )
    dapo.run()
    trained = list(dict.fromkeys(row["prompt"] for row in samples(dapo)))
    stream = [prompt.uid for prompt in PromptLoader(prompts(16), seed=1, shuffle=True).take(40)]
    assert [uid for step in (1, 2, 3) for uid in grpo[step]] == stream[:12]
    places = [stream.index(uid) for uid in trained]
    assert places == sorted(places) != [0, 1, 2, 3]
