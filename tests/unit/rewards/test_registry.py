"""Verifiers of plug-ins: by name, by data source, and refused where a name is taken."""

from __future__ import annotations

import pytest

from megatron_rl import plugins
from megatron_rl.rewards import Task, Verdict, Verifier, register_verifier, registry
from megatron_rl.rewards.build import build_reward
from tests.unit.rewards.cases import accuracies, config, prompt, restarts

PLUGIN = """
import numpy

from megatron_rl.rewards import Task, Verdict, Verifier, register_verifier

@register_verifier("half", sources="toys/.*|gsm8k")
def half(task: Task, answer: str) -> float:
    return 0.5

@register_verifier("careful")
class Careful(Verifier):
    def check(self, tasks):
        return [f"{task.uid}: has no answer" for task in tasks if task.answer == "none"]

    def prepare(self):
        self.ready = True

    def verify(self, task, answer):
        return Verdict(float(self.ready and answer == task.answer))

@register_verifier("single")
class Single(Verifier):
    def verify(self, task, answer):
        return Verdict(numpy.float32(answer == task.answer))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(registry, "_sources", list(registry._sources))
    path = tmp_path / "half.py"
    path.write_text(PLUGIN)
    plugins.load_plugins([str(path)])


def test_a_function_by_name_with_and_without_partial_credit(plugin):
    for partial, expected in ((False, 0), (True, 0.5)):
        reward = build_reward(config(verifier="half", partial_credit=partial))
        reward.check([prompt()])
        assert accuracies(reward, [prompt()], ["x"]) == [expected]
        reward.close()


def test_a_plug_in_claims_data_sources(plugin):
    reward = build_reward(config(verifier="auto", partial_credit=True))
    prompts = [prompt(source="toys/a"), prompt(source="gsm8k"), prompt(source="openai/gsm8k")]
    reward.check(prompts)
    assert accuracies(reward, prompts, ["4"] * 3) == [0.5, 0.5, 1]
    reward.close()


def test_a_class_checks_prompts_and_prepares_its_worker(plugin):
    reward = build_reward(config(verifier="careful"))
    with pytest.raises(ValueError, match="toy:1: has no answer"):
        reward.check([prompt("none")])
    reward.check([prompt()])
    assert accuracies(reward, [prompt()] * 2, ["4", "5"]) == [1, 0]
    reward.close()


def test_an_accuracy_may_be_a_number_of_numpy(plugin):
    reward = build_reward(config(verifier="single"))
    reward.check([prompt()])
    assert accuracies(reward, [prompt()] * 2, ["4", "5"]) == [1, 0]
    assert not reward.problems and restarts(reward) == 0
    reward.close()


def test_an_unknown_name_is_refused_with_its_neighbors(plugin):
    with pytest.raises(
        ValueError,
        match=(
            r"reward\.verifier = hlaf: no such verifier; did you mean half\?.* there are auto,"
            r" careful, choice, code"
        ),
    ):
        build_reward(config(verifier="hlaf"))


@pytest.mark.parametrize("name", ["math", "auto"])
def test_a_name_that_is_taken_is_refused(plugin, name):
    with pytest.raises(ValueError, match=rf"register_verifier\('{name}'\): .*; choose another"):
        register_verifier(name)(lambda task, answer: 1.0)


@pytest.mark.parametrize(
    ("made", "words"),
    [(lambda task: 1.0, "give it these two"), (int, "int is no Verifier; derive it from that")],
)
def test_what_is_no_verifier_is_refused_where_it_is_registered(plugin, made, words):
    with pytest.raises(ValueError, match=words):
        register_verifier("mine")(made)


def test_what_plug_ins_need_is_in_one_place():
    assert issubclass(registry.verifier_class("exact"), Verifier)
    assert Verdict(1.0).problem is None and Task("a", "b", "c").extra == {}


def test_a_verifier_that_no_worker_can_prepare_is_an_error_of_its_author(plugin, tmp_path):
    path = tmp_path / "unready.py"
    path.write_text(
        "from megatron_rl.rewards import Verifier, register_verifier\n"
        "@register_verifier('unready')\n"
        "class Unready(Verifier):\n"
        "    def prepare(self):\n"
        "        raise OSError('no such table')\n"
    )
    plugins.load_plugins([str(path)])
    reward = build_reward(config(verifier="unready"))
    with pytest.raises(
        ValueError, match=r"unready: no worker can prepare it \(OSError: no such table\)"
    ):
        reward.score([prompt()], ["4"], [False])
    reward.close()
