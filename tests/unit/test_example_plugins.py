"""The files of examples/plugins as they stand, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from megatron_rl.config.load import compose, validate
from megatron_rl.config.method import load_method
from megatron_rl.config.schema import Config
from megatron_rl.hooks import ROLLOUT_HOOKS, Ask, Resample, ScoredGroup
from megatron_rl.loss import ResponseBatch, TokenBatch
from megatron_rl.models import read_architecture
from megatron_rl.plugins import load_plugins, loaded, sources
from megatron_rl.rollouts.hooks.resampling import resampling_of
from megatron_rl.rollouts.hooks.rollout_hooks import RolloutHooks, edited
from megatron_rl.rollouts.rows.experience import Response
from megatron_rl.runtime.launch import World
from megatron_rl.signals import signals_of
from megatron_rl.types import Completion, Prompt, Score
from tests.launch import REPO

PLUGINS = REPO / "examples" / "plugins"
WORLD = World(rank=0, size=1, local_rank=0, launch_id="test")
pytestmark = pytest.mark.usefixtures("fresh_registries")


def load(*names: str) -> None:
    load_plugins([str(PLUGINS / f"{name}.py") for name in names])


def batch(rewards: list[float], lengths: list[int]) -> ResponseBatch:
    """One group of float64 rewards; a reward of 1 is correct."""
    values = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    return ResponseBatch(values, values == 1, ids, torch.tensor(lengths))


def test_the_estimator_cuts_the_z_score():
    """One of eight right: z = 7/8 / (sqrt(7)/8) = sqrt(7) = 2.65, cut at 1.5; the others
    -1/sqrt(7)."""
    load("clipped_advantage")
    method = load_method("clipped_grpo", ["eps=0"])
    found = method.credit(batch([1, 0, 0, 0, 0, 0, 0, 0], [5] * 8)).advantages
    assert found[0] == 1.5
    assert found[1:].tolist() == pytest.approx([-1 / math.sqrt(7)] * 7, abs=1e-15)
    wider = load_method("clipped_grpo", ["eps=0", "estimator.limit=3"])
    advantages = wider.credit(batch([1, 0, 0, 0, 0, 0, 0, 0], [5] * 8)).advantages
    assert advantages[0].item() == pytest.approx(math.sqrt(7), abs=1e-15)


def test_the_signal_remembers_the_mean_reward(tmp_path):
    """Rewards of mean 1/2, then 1: baselines 0 and (1 - 0.8) / 2 = 0.1, then 0.1 + 0.2 * 0.9."""
    load("moving_baseline")
    method = load_method("grpo", ["estimator={name: above_earlier, momentum: 0.8}"])
    (signal,) = signals_of(method).members
    found = []
    for rewards in ([1.0, 0.0], [1.0, 1.0]):
        columns = signal.after_rollout(None)
        credit = method.credit(replace(batch(rewards, [5, 5]), columns=columns))
        signal.after_credit(None, credit)
        found.append(credit.advantages.tolist())
    assert found[0] == [1, 0] and found[1] == pytest.approx([0.9, 0.9])
    again = signals_of(method)
    again.restore({"MovingBaseline": signal.state()})
    assert again.members[0].after_rollout(None)["baseline"].item() == pytest.approx(0.28)


def test_the_shaper_takes_from_long_correct_responses():
    """Mean length 20; the correct one of 30 is half as long again: 1 / (1 + 0.5 * 0.5) = 0.8."""
    load("brevity")
    method = load_method("grpo", ["eps=0", "shaping.brevity={}"])
    found = method.credit(batch([1, 1, 0, 0], [10, 30, 30, 10])).advantages
    assert found.tolist() == [1, 0.8, -1, -1]
    strong = load_method("grpo", ["eps=0", "shaping.brevity.strength=2"])
    assert strong.credit(batch([1, 1, 0, 0], [10, 30, 30, 10])).advantages.tolist() == [
        1,
        0.5,
        -1,
        -1,
    ]


def test_the_policy_loss_clips_from_above():
    """Ratios 1.5 and 0.5, advantages 2 and -1: -1.2 * 2 = -2.4 and 0.5 * 1 = 0.5; their mean is
    -0.95.
    The clipped token has no gradient, the other one d(rho)/d(logp) = 0.5, halved by the mean."""
    load("one_sided")
    method = load_method(
        "grpo", ["policy_loss={name: one_sided}", "kl.coef=0", "aggregate.name=token_mean"]
    )
    logprobs = torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.zeros(2, dtype=torch.float64),
        response_index=torch.tensor([0, 1]),
        loss_mask=torch.tensor([True, True]),
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        kl_weights=torch.ones(2, dtype=torch.float64),
    )
    result = method.loss(tokens)
    assert result.loss.item() == pytest.approx(-0.95, abs=1e-15)
    result.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0.25], abs=1e-15)


def group(correct: list[bool], truncated: list[bool]) -> list[Response]:
    prompt = Prompt("p", (1,), "a", "test")
    return [
        Response(prompt, Completion((3,), (-0.1,), cut, 0), "text", Score(float(right), right, {}))
        for right, cut in zip(correct, truncated, strict=True)
    ]


def test_the_hook_drops_solved_groups_and_charges_truncation():
    """Shares 1 and 1/2: the first group goes. Truncated responses lose 0.25."""
    load("drop_easy")
    overrides = [
        "model.path=m",
        "data.train=t",
        "data.eval=e",
        "rollout_hooks.drop_easy.penalty=0.25",
    ]
    config = validate(Config, compose("config", overrides), "test")
    assert json.loads(config.model_dump_json())["rollout_hooks"] == {
        "drop_easy": {"name": "drop_easy", "above": 0.9, "penalty": 0.25}
    }
    hooks = RolloutHooks(config.rollout_hooks, WORLD)
    solved, mixed = group([True, True], [False, True]), group([True, False], [True, False])
    edit = hooks(1, [solved, mixed])
    kept, metrics = edited([solved, mixed], edit), edit.metrics
    assert [[response.score.reward for response in group] for group in kept] == [[0.75, 0.0]]
    assert kept[0][0].score.correct
    assert metrics == {"hook/drop_easy/dropped_groups": 1.0}
    edit = hooks(2, [solved, solved])
    kept, metrics = edited([solved, solved], edit), edit.metrics
    assert len(kept) == 1 and metrics == {"hook/drop_easy/dropped_groups": 1.0}


def test_the_sampling_hook_asks_for_groups_that_are_all_wrong():
    load("ask_once_more")
    chosen = {"ask_once_more": ROLLOUT_HOOKS["ask_once_more"].schema()}
    hook = resampling_of(chosen, ()).hooks["ask_once_more"]
    prompts = [Prompt(uid, (1,), "2", "toy") for uid in "ab"]
    verdicts = [[Score(0.0, False)] * 3, [Score(0.0, False), Score(1.0, True)]]
    groups = [ScoredGroup(*pair) for pair in zip(prompts, verdicts, strict=True)]
    wanted = hook.resample(1, 0, groups)
    assert wanted.asks == [Ask(prompts[0], 3, into=0)] and wanted.metrics == {"asked_groups": 1}
    assert hook.resample(1, 1, groups) == Resample()


def test_the_family_is_read_by_the_policy_and_known_to_the_engine(tmp_path):
    config = Qwen3Config(num_hidden_layers=2, architectures=["RenamedQwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"architectures \['RenamedQwen3ForCausalLM'\], which the policy"
    ):
        read_architecture(tmp_path)
    load("renamed_qwen3")
    architecture, _ = read_architecture(tmp_path)
    assert (architecture.num_layers, architecture.qk_norm, architecture.qkv_bias) == (
        2,
        True,
        False,
    )
    from vllm import ModelRegistry

    assert "RenamedQwen3ForCausalLM" in ModelRegistry.get_supported_archs()


def test_what_was_loaded_is_recorded_with_its_digest():
    load("drop_easy")
    path = str(PLUGINS / "drop_easy.py")
    assert path in loaded()
    assert re.fullmatch("[0-9a-f]{64}", sources()[path])


def test_every_example_has_a_page_that_names_it_and_the_index_has_both():
    index = (PLUGINS / "README.md").read_text()
    pages = {
        page.name: page.read_text() for page in PLUGINS.glob("*.md") if page.name != "README.md"
    }
    for example in PLUGINS.glob("*.py"):
        page = re.search(r"The page: (\w+\.md)", example.read_text()).group(1)
        assert (
            example.name in pages[page] and f"]({page})" in index and f"]({example.name})" in index
        )
    assert all(f"]({name})" in index for name in pages)


@pytest.mark.parametrize("page", sorted(PLUGINS.glob("*.md")), ids=lambda path: path.stem)
def test_code_in_the_pages_is_the_code_of_the_files(page: Path):
    """A python block of a page stands in one of the files, line by line."""
    files = [path.read_text() for path in PLUGINS.glob("*.py")]
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert any(block.strip() in text for text in files), block
