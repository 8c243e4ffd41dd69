"""What a method reads is found in the table of signals, with their settings among its knobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.errors import RegistrationError
from megatron_rl.loss import Evidence, register_estimator, register_policy_loss, register_shaper
from megatron_rl.passes import Output, TokenScores
from megatron_rl.signals import Signal, register_signal, signals_of
from megatron_rl.types import Prompt
from tests import zoo
from tests.unit.trainer.runs import bandit_config

pytestmark = pytest.mark.usefixtures("fresh_registries")


@pytest.mark.parametrize(
    ("name", "overrides", "scored", "updated"),
    [
        ("grpo", [], [Output("entropy")], []),
        ("grpo", ["entropy.metric=false"], [], []),
        ("grpo", ["entropy.coef=0.1"], [Output("entropy")], [Output("entropy", gradient=True)]),
        ("archer", ["entropy.metric=false"], [Output("entropy")], [Output("entropy")]),
        ("pacs", ["entropy.metric=false"], [], []),
        ("arm", ["entropy.metric=false"], [Output("prompt_logprobs")], []),
    ],
)
def test_the_policy_computes_of_tokens_what_the_method_reads(name, overrides, scored, updated):
    found = signals_of(load_method(name, overrides))
    assert [*found.score_outputs] == scored and [*found.update_outputs] == updated


def test_settings_of_a_signal_are_knobs_of_who_reads_it():
    simko = signals_of(load_method("simko", ["policy_loss.top_k=5"])).update_outputs
    assert {(output.name, output.value) for output in simko} == {
        ("entropy", 0),
        ("topk_logprobs", 5),
        ("is_argmax", 0),
    }
    (nucleus,) = signals_of(load_method("siren", ["entropy_anchor.top_p=0.7"])).update_outputs
    assert (nucleus.name, nucleus.value, nucleus.gradient) == ("nucleus_entropy", 0.7, True)
    assert signals_of(load_method("laser")).extra_tokens == 1


def test_one_that_no_signal_gives_is_named_with_its_reader():
    register_estimator("mine")(lambda rewards, mean_logprob: rewards)
    method = load_method("grpo", ["estimator={name: mine}"])
    message = (
        r"estimator mine reads mean_logprob, .* no signal gives it; did you mean mean_logprobs"
    )
    with pytest.raises(ValueError, match=message):
        signals_of(method)


def test_a_reader_without_the_knob_of_the_signal_is_refused():
    def likely(advantages: Tensor, log_ratio: Tensor, topk_logprobs: Tensor) -> Tensor: ...

    register_policy_loss("likely")(likely)
    with pytest.raises(
        ValueError, match="policy loss likely: reads topk_logprobs, so it needs the knob top_k"
    ):
        signals_of(load_method("grpo", ["policy_loss={name: likely}"]))


def test_two_readers_agree_on_a_knob():
    def other(advantages: Tensor, response_confidence: Tensor, *, tail: float = 0.5) -> Tensor: ...

    register_shaper("other")(other)
    with pytest.raises(
        ValueError, match=r"shaper confidence_gap and shaper other .* different tail \(0.2, 0.5"
    ):
        signals_of(load_method("arm", ["shaping.other={}"]))
    signals_of(load_method("arm", ["shaping.other.tail=0.2"]))


def test_a_column_has_one_signal():
    with pytest.raises(RegistrationError, match=r"the column kl is that of .*ReferenceKl; give"):
        register_signal(type("Mine", (Signal,), {"columns": ("kl",)}))
    with pytest.raises(RegistrationError, match="functions are given a field rewards as it is"):
        register_signal(type("Mine", (Signal,), {"columns": ("rewards",)}))
    with pytest.raises(RegistrationError, match="signal Empty: has no columns"):
        register_signal(type("Empty", (Signal,), {}))


def test_an_estimator_of_a_registered_signal(build):
    """By the real learner: each response has the number of its prompt as its advantage."""

    @register_signal
    class PromptNumber(Signal):
        columns = ("prompt_number",)

        def after_rollout(self, view):
            return {"prompt_number": view.experience.group_ids.float()}

    def numbered(evidence: Evidence, prompt_number: Tensor) -> Tensor:
        return prompt_number

    register_estimator("numbered")(numbered)
    trainer = build(method="grpo", method_overrides=["estimator={name: numbered}"])
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    scored = trainer.learner.score(trainer.source.next(1))
    assert scored.credit.advantages.tolist() == [float(row // 8) for row in range(32)]


@pytest.mark.parametrize(
    ("method", "prompt", "message"),
    [
        (
            "durian",
            Prompt("p:2", (1, 2), "1", "toy"),
            r"prompt p:2: .*tools/visual_entropy\.py.*method=durian_reasoning",
        ),
        ("arm", Prompt("p:3", (1,), "1", "toy"), "prompt p:3 is a single token: method arm"),
    ],
)
def test_prompts_that_a_signal_is_not_defined_for_are_named(
    tmp_path: Path, method, prompt, message
):
    fine = Prompt("p:1", (1, 2), "1", "toy", {"visual_entropy": 0.5})
    config = bandit_config(tmp_path, [f"method={method}"])
    signals = signals_of(load_method(method))
    signals.check([fine], config)
    with pytest.raises(ValueError, match=message):
        signals.check([fine, prompt], config)


def test_statistics_of_old_logprobs_by_hand(build):
    """Tokens -1, -3 and one that nobody sampled of the first response, all -2 of the others; the
    reference is 0.5 lower: k2 = 0.125 a token. The tail of a half is the less likely token."""
    trainer = build()
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    learner = trainer.learner
    experience = learner.placement.to_owners(trainer.source.next(1))
    old = torch.full((96,), -2.0)
    old[:3] = torch.tensor([-1.0, -3.0, torch.nan])
    sampled = torch.ones(96, dtype=torch.bool)
    sampled[2] = False
    scores = {"old": TokenScores(old, {"entropy": -old}), "ref": TokenScores(old - 0.5)}
    view = learner.view(replace(experience, **scores))
    view = replace(view, tokens={**view.tokens, "sampled": sampled.numpy()})
    chosen = ["kl.placement=reward", "kl.estimator=k2", "shaping.confidence_gap.tail=0.5"]
    chosen += ["filters.demonstrations={count: 1}"]
    signals = signals_of(load_method("durian_reasoning", chosen))
    signals = replace(
        signals,
        members=[one for one in signals.members if type(one).__name__ != "PromptConfidence"],
    )
    of_tokens, columns = signals.after_rollout(view)
    assert of_tokens == {}
    assert columns["mean_logprobs"].tolist() == [-2] * 32
    assert columns["mean_entropy"].tolist() == [2] * 32
    assert not columns["is_demonstration"].any()
    assert columns["sum_logprobs"].tolist() == [-4] + [-6] * 31
    assert columns["kl"].tolist() == [0.25] + [0.375] * 31
    expected = torch.tensor([-3.0] + [-2.0] * 31).exp()
    torch.testing.assert_close(columns["response_confidence"], expected)


@pytest.mark.parametrize(
    ("method", "column"),
    [
        ("simko", "topk_logprobs"),
        ("score_centered", "likely_logprobs"),
        ("siren", "peaks"),
        ("laser", "end_logprobs"),
        ("grpo", None),
        ("archer", None),
    ],
)
def test_methods_of_other_tokens_are_refused_where_the_sampler_keeps_few(
    tmp_path: Path, method, column
):
    cut = bandit_config(tmp_path, [f"method={method}", "rollout.top_k=5", "rollout.top_p=0.9"])
    signals = signals_of(load_method(method))
    if column is None:
        signals.check([], cut)
        return
    with pytest.raises(ValueError, match=f"top_k = 5: the method reads {column}, which needs"):
        signals.check([], cut)


def test_tokens_without_recorded_experts_refuse_router_replay(tmp_path: Path) -> None:
    """laser's updates score the end token in places that the old-policy pass has not computed."""
    replay = bandit_config(tmp_path, ["rollout.router_replay=old_policy"])
    signals_of(load_method("grpo")).check([], replay)
    with pytest.raises(ValueError, match="router_replay = old_policy: the method reads end_log"):
        signals_of(load_method("laser")).check([], replay)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["source=servers", "source.schedule=free"], "source.schedule = free: responses that are"),
        (["source.partial.groups_in_flight=5"], "groups_in_flight: responses that are recorded"),
        ([], "policy_loss.top_k: 129 tokens are read, and the model has 128"),
    ],
)
def test_what_lacks_the_most_likely_tokens_is_refused(tmp_path: Path, words, says) -> None:
    zoo.save_tiny_model("qwen2", tmp_path / "model")
    top_k = ["policy_loss.top_k=2"] if words else ["policy_loss.top_k=128"]
    model = [f"model.path={tmp_path}/model"]
    config = bandit_config(tmp_path, ["method=score_centered", *model, *words])
    with pytest.raises(ValueError, match=says):
        signals_of(load_method("score_centered", top_k)).check([], config)
