"""A function's signature is all there is to say: inputs before the star, knobs after it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_rl.config.load import add_config_dir
from megatron_rl.config.method import load_method
from megatron_rl.errors import ConfigError
from megatron_rl.loss import (
    Evidence,
    Terms,
    register_estimator,
    register_policy_loss,
    register_shaper,
)
from megatron_rl.loss.per_response import advantages
from tests.unit.loss import test_advantages
from tests.unit.loss.batches import response_batch, rollout, token_batch

pytestmark = pytest.mark.usefixtures("fresh_registries")
GUIDE = Path(__file__).parents[3] / "megatron_rl/loss/README.md"


def test_inputs_are_found_by_name_or_taken_whole() -> None:
    def whole(evidence: Evidence, *, scale: float = 2.0) -> Tensor:
        return scale * evidence.rewards * evidence.share

    def named(share: Tensor, rewards: Tensor, *, scale: float = 2.0) -> Tensor:
        return scale * rewards * share

    def shaped(lengths: Tensor, advantages: Tensor, evidence: Evidence) -> Tensor:
        return advantages * lengths * evidence.eps

    register_estimator("whole")(whole)
    register_estimator("named")(named)
    register_shaper("shaped")(shaped)
    batch = response_batch(rollout(0))

    def found(*overrides: str) -> Tensor:
        return load_method("grpo", overrides).credit(batch).advantages

    by_whole, by_name = (found(f"estimator={{name: {name}}}") for name in ("whole", "named"))
    assert by_whole.any() and torch.equal(by_whole, by_name)
    halved = found("estimator={name: named, scale: 1.0}", "shaping.shaped={}")
    assert torch.equal(halved, by_name / 2 * batch.response_tokens * 1e-6)


def test_a_policy_loss_names_its_terms() -> None:
    def named(advantages: Tensor, log_ratio: Tensor) -> Tensor:
        return -log_ratio.exp() * advantages

    def whole(terms: Terms) -> Tensor:
        return -terms.log_ratio.exp() * terms.advantages

    register_policy_loss("named")(named)
    register_policy_loss("whole")(whole)
    rows = rollout(1)
    methods = [
        load_method("grpo", [f"policy_loss={{name: {name}}}"])
        for name in ("named", "whole", "ratio")
    ]
    tokens = token_batch(rows, methods[0].credit(response_batch(rows)))
    losses = {method.loss(tokens).loss.item() for method in methods}
    assert len(losses) == 1 and losses != {0.0}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "mismatch.kind=tsi",
            "mismatch.kind = 'tsi': is not one of the mismatch corrections none, tis, icepop,"
            " sequence_mask; did you mean tis?",
        ),
        (
            "kl.estimator=k4",
            "kl.estimator = 'k4': is not one of the KL estimators k1, k2, k3, low_var_kl",
        ),
        ("kl.weights.name=dad", "is not one of the KL weights constant, dads; did you mean dads?"),
        ("estimator={name: lead, weight_midpoint: 2}", "less than or equal to 1"),
        ("estimator={name: signed, positive: 1}", "estimator.negative: no value"),
        ("estimator={name: pass_at_k, eps: 1}", "eps = 1: is no knob of estimator pass_at_k"),
    ],
)
def test_signatures_are_strict_schemas(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_method("grpo", [override])
    assert message in str(caught.value)


def test_the_guide_of_a_new_estimator_works_as_it_stands(tmp_path: Path) -> None:
    """Function, yaml and test by hand of the loss's README, each where the page puts it."""
    text = GUIDE.read_text(encoding="utf-8")
    function, by_hand = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    module = dict(vars(advantages))
    exec(function, module)
    (tmp_path / "method").mkdir()
    (tmp_path / "method/median.yaml").write_text(yaml)
    add_config_dir(tmp_path)
    rows = response_batch(rollout(0))
    plain = load_method("median").credit(rows).advantages
    doubled = load_method("median", ["estimator.scale=2"]).credit(rows).advantages
    assert plain.any() and torch.equal(doubled, 2 * plain)
    with pytest.raises(ConfigError, match=r"estimator\.scale = 0"):
        load_method("median", ["estimator.scale=0"])
    tests = {**vars(test_advantages), "adv": SimpleNamespace(**module)}
    exec(by_hand, tests)
    tests["test_median_baseline_by_hand"]()
