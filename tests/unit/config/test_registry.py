"""What a plug-in may register, and what it is told when it may not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from megatron_rl.config.load import add_config_dir, compose
from megatron_rl.config.method import load_method
from megatron_rl.errors import ConfigError, RegistrationError
from megatron_rl.hooks import register_rollout_hook
from megatron_rl.loss import (
    EstimatorNeeds,
    Evidence,
    Terms,
    register_estimator,
    register_policy_loss,
    register_shaper,
    register_token_shaper,
)
from megatron_rl.loss.config import reward_scheme_errors
from megatron_rl.models import Family, register_family
from megatron_rl.plugins import load_plugins
from megatron_rl.signals import signals_of
from tests.unit.loss.batches import response_batch, rollout, token_batch

pytestmark = pytest.mark.usefixtures("fresh_registries")


def plain(evidence: Evidence, *, factor: float = 1.0) -> Tensor:
    return factor * evidence.rewards


def every_knob(
    evidence: Evidence,
    *,
    needed: int,
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
    mode: Literal["a", "b"] = "a",
    window: tuple[int, int] | None = None,
) -> Tensor:
    return evidence.rewards * needed


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_method("grpo", overrides)
    return str(caught.value)


@pytest.mark.parametrize("built", [functools.partial(plain, factor=2.0), Terms])
def test_what_is_no_plain_function_is_refused(built):
    """Its knobs could not be read."""
    with pytest.raises(RegistrationError, match="is no plain function; write one by def"):
        register_estimator("built")(built)


def test_knobs_of_a_plug_in_are_as_strict_as_built_in_ones():
    register_estimator("every_knob")(every_knob)
    chosen = "estimator={name: every_knob, needed: 3, share: 1, window: [1, 2]}"
    found = load_method("grpo", [chosen]).config.estimator.model_dump()
    assert found == {"name": "every_knob", "needed": 3, "share": 1.0, "mode": "a", "window": (1, 2)}
    message = refused("estimator={name: every_knob, share: 2, mode: c, window: [1, x]}")
    assert message.startswith("4 problems")
    for part in (
        "estimator.needed: no value",
        "estimator.share = 2",
        "estimator.mode = 'c'",
        "estimator.window.1 = 'x'",
    ):
        assert part in message
    assert (
        "is no knob of estimator every_knob (its knobs are needed, share, mode, window)"
        in refused("estimator={name: every_knob, needed: 1, neded: 1}")
    )
    assert "did you mean every_knob?" in refused("estimator={name: every_knb}")


def no_annotation(evidence, *, factor=1.0): ...
def no_star(evidence, factor: float = 1.0): ...
def any_knobs(evidence, **knobs: float): ...
def two(evidence, *, name: str = "x"): ...
def shadow(evidence, *, copy: bool = False): ...
def of_tensor(evidence, *, weights: Tensor | None = None): ...
def undefined(evidence, *, limit: Missing = 1): ...  # noqa: F821 (that it is missing is the case)


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("zscore", plain, "estimator 'zscore' is a built-in; give yours another name"),
        (
            "My-One",
            plain,
            "a name is lower-case letters, digits and underscores, e.g. my_estimator",
        ),
        ("mine", no_annotation, "knob factor has no type; write factor: float"),
        ("mine", no_star, r"must have the form \(evidence, \*, knob: float = 1.0\)"),
        ("mine", any_knobs, "must have the form"),
        ("mine", two, "a knob cannot be called name"),
        ("mine", shadow, "a knob cannot be called copy"),
        ("mine", of_tensor, "has a type that a yaml cannot hold"),
        ("mine", undefined, "an annotation of undefined is not defined .*Missing.*; import it"),
    ],
)
def test_what_cannot_be_registered_says_why(name, function, message):
    with pytest.raises(RegistrationError, match=message):
        register_estimator(name)(function)
    register_estimator("mine")(plain)  # a refused one leaves no trace


def test_a_name_is_registered_once_in_every_table():
    def loss(terms: Terms) -> Tensor: ...
    def shaper(advantages: Tensor, evidence: Evidence) -> Tensor: ...
    def token_shaper(advantages: Tensor, terms: Terms) -> Tensor: ...
    def hook(step: int, groups: Any): ...

    family = Family("MineForCausalLM", lambda hf: hf)
    for register, own, built_in in (
        (lambda name: register_estimator(name)(plain), "mine", "rloo"),
        (lambda name: register_shaper(name)(shaper), "mine", "stcr"),
        (lambda name: register_token_shaper(name)(token_shaper), "mine", "entropy_bonus"),
        (lambda name: register_policy_loss(name)(loss), "mine", "ppo_clip"),
        (lambda name: register_rollout_hook(name)(hook), "mine", None),
        (
            lambda name: register_family(Family(name, family.read)),
            "MineForCausalLM",
            "Qwen3ForCausalLM",
        ),
    ):
        register(own)
        with pytest.raises(
            RegistrationError, match=r"already registered by .*test_registry|is known already"
        ):
            register(own)
        if built_in is not None:
            with pytest.raises(RegistrationError, match=r"built-in|is known already"):
                register(built_in)


def test_wrong_needs_are_refused():
    with pytest.raises(RegistrationError, match="min_group names the knob 'k', which it has not"):
        register_estimator("mine", needs=EstimatorNeeds(min_group="k"))(plain)
    with pytest.raises(RegistrationError, match="needs the knobs low: float and high: float"):
        register_policy_loss("mine", clips=True)(lambda terms: terms.log_ratio)
    register_estimator("mine")(plain)
    register_policy_loss("mine")(lambda terms: terms.log_ratio)


def test_what_a_function_of_tokens_reads_is_known():
    """Named as an input, beside the terms as a whole too."""

    def named(advantages: Tensor, entropy: Tensor) -> Tensor:
        return advantages * entropy

    def whole(advantages: Tensor, terms: Terms, entropy: Tensor) -> Tensor:
        return advantages * terms.entropy

    register_token_shaper("named")(named)
    register_token_shaper("whole")(whole)
    rows = response_batch(rollout(0))
    by_name, by_whole, plainly = (
        load_method("grpo", [f"token_shaping={chosen}"])
        for chosen in ("{named: {}}", "{whole: {}}", "{}")
    )
    assert [[*method.reads] for method in (by_name, by_whole, plainly)] == [["entropy"]] * 2 + [[]]
    tokens = token_batch(rollout(0), by_name.credit(rows))
    losses = [method.loss(tokens).loss.item() for method in (by_name, by_whole, plainly)]
    assert losses[0] == losses[1] != losses[2]


def test_needs_reach_the_trainer_and_the_batch():
    def confident(evidence: Evidence, mean_logprobs: Tensor, kl: Tensor, *, k: int = 3) -> Tensor:
        return evidence.rewards * mean_logprobs - kl

    needs = EstimatorNeeds(min_group="k", unit_rewards=True)
    register_estimator("confident", needs=needs)(confident)
    method = load_method("grpo", ["estimator={name: confident}", "kl.coef=0"])
    assert method.config.min_group == 3 and signals_of(method).needs("ref")
    assert [*method.reads] == ["mean_logprobs", "kl"]
    rows = response_batch(rollout(0))
    expected = rows.rewards * rows.columns["mean_logprobs"] - rows.columns["kl"]
    assert torch.equal(method.credit(rows).advantages, expected)
    assert "they reach 1.5" in reward_scheme_errors(method.config, 1.0, 0.5)[0]
    with pytest.raises(ConfigError, match="estimator confident needs rewards in \\[0, 1\\]"):
        load_method("grpo", ["estimator={name: confident}", "kl.placement=reward"])
    from dataclasses import replace

    with pytest.raises(ValueError, match="ResponseBatch has no kl, but the method reads it"):
        method.credit(replace(rows, columns={"mean_logprobs": rows.rewards}))
    with pytest.raises(ValueError, match=r"confident .* needs at least 9, but a group has 4"):
        load_method("grpo", ["estimator={name: confident, k: 9}", "kl.coef=0"]).credit(rows)
    with pytest.raises(ValueError, match=r"needs rewards in \[0, 1\] and got \[0, 2\]"):
        method.credit(replace(rows, rewards=2 * rows.rewards.round()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda evidence: evidence.rewards[:-1],
            r"estimator wrong: returned \(\d+,\) torch.float64; return a tensor",
        ),
        (lambda evidence: evidence.correct, "torch.bool; return a tensor"),
        (lambda evidence: None, "estimator wrong: returned NoneType"),
        (
            lambda evidence: evidence.rewards / 0,
            r"estimator wrong: the advantage of response \d+ is (nan|inf) at a reward of",
        ),
    ],
)
def test_what_a_plug_in_returns_is_looked_at(wrong, message):
    register_estimator("wrong")(wrong)
    with pytest.raises(ValueError, match=message):
        load_method("grpo", ["estimator={name: wrong}"]).credit(response_batch(rollout(0)))


def test_a_policy_loss_gives_one_value_per_token():
    register_policy_loss("summed")(lambda terms: terms.log_ratio.sum())
    rows = rollout(0)
    method = load_method("grpo", ["policy_loss={name: summed}"])
    with pytest.raises(
        ValueError, match=r"policy loss summed: returned \(\); return a tensor \(\d+,\)"
    ):
        method.loss(token_batch(rows, method.credit(response_batch(rows))))


def test_a_plug_in_that_repeats_a_built_in_loss_gives_its_numbers():
    """gspo again, from the outside: the sequence's ratio, and the shares of clipped tokens."""

    def again(terms: Terms, *, low: float = 3e-4, high: float = 4e-4) -> Tensor:
        ratio = terms.log_ratio.exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        return torch.maximum(-ratio * terms.advantages, -clipped * terms.advantages)

    register_policy_loss("again", sequence_ratio=True, clips=True)(again)
    rows = rollout(1)
    built_in, mine = (
        load_method("grpo", [f"policy_loss={{name: {name}}}"]) for name in ("gspo", "again")
    )
    tokens = token_batch(rows, built_in.credit(response_batch(rows)))
    expected = built_in.loss(tokens)
    found = mine.loss(tokens)
    assert found.loss.item() == expected.loss.item()
    assert {key: value.item() for key, value in found.metrics.items()} == {
        key: value.item() for key, value in expected.metrics.items()
    }


def test_a_folder_of_a_plug_in_is_searched(tmp_path: Path):
    (tmp_path / "conf/method").mkdir(parents=True)
    (tmp_path / "conf/method/mine.yaml").write_text(
        "name: mine\nestimator: {name: centered}\npolicy_loss: {name: ppo_clip}\naggregate: {name:"
        " token_mean}\nkl: {coef: 0}\n"
    )
    with pytest.raises(ConfigError, match="method=mine: no such option"):
        compose("config", ["method=mine"])
    add_config_dir(tmp_path / "conf")
    add_config_dir(tmp_path / "conf")
    assert compose("config", ["method=mine"])["method"]["estimator"] == {"name": "centered"}
    assert load_method("mine").config.name == "mine"
    with pytest.raises(ConfigError, match="did you mean mine"):
        compose("config", ["method=mne"])
    (tmp_path / "more/method").mkdir(parents=True)
    (tmp_path / "more/method/grpo.yaml").write_text("name: grpo\n")
    with pytest.raises(
        RegistrationError, match=r"method/grpo.yaml is in .*conf as well; rename yours"
    ):
        add_config_dir(tmp_path / "more")
    with pytest.raises(RegistrationError, match=r"holds no GROUP/OPTION\.yaml"):
        add_config_dir(tmp_path / "nowhere")


def test_a_refused_registration_is_one_message_with_the_file(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from megatron_rl.loss import register_estimator\n\n\n@register_estimator('rloo')\ndef"
        " f(e): ...\n"
    )
    with pytest.raises(
        ValueError,
        match=r"^--plugin = .*mine.py: estimator 'rloo' is a built-in; give yours another name$",
    ):
        load_plugins([str(file)])
    file.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        ValueError, match=r"ZeroDivisionError: division by zero\), line 2 of mine.py; give"
    ):
        load_plugins([str(file)])
