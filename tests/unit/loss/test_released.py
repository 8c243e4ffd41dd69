"""What the cards say of released code, where an option gives it: values by hand."""

import re

import pytest
import torch

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.loss import ResponseBatch
from tests.unit.loss.groups import flags, same, vector


def advantages(
    name: str, *overrides: str, correct: tuple[int, ...], lengths: list[int]
) -> torch.Tensor:
    """Of one group without format rewards."""
    right = flags(*correct)
    batch = ResponseBatch(right.double(), right, right.long() * 0, torch.tensor(lengths))
    return load_method(name, ["eps=0", *overrides]).credit(batch).advantages


def test_the_sample_std_by_hand() -> None:
    """Of 1, 0, 0, 0: mean 0.25, squares 0.75, so 0.433013 over 4 and 0.5 over 3."""
    one_of_four = {"correct": (1, 0, 0, 0), "lengths": [1, 1, 1, 1]}
    same(advantages("grpo", **one_of_four), 1.732051, *[-0.577350] * 3)
    for name in ("grpo", "apo", "positive_dominant", "hard_focused", "mapo"):
        factor = advantages(name, "std_ddof=1", **one_of_four) / advantages(name, **one_of_four)
        if name == "mapo":  # p = 1/4: three quarters of zscore, one quarter (r - mu) / mu
            same(factor[:1], (0.75 * 1.5 + 0.25 * 3) / (0.75 * 1.732051 + 0.25 * 3))
        else:
            same(factor, *[0.866025] * 4)


def test_the_weaker_mu_of_apo_by_hand() -> None:
    """1000 tokens too long: 2 - 1.00001^-1000 = 1.009950; the paper's 1.0001 gives 1.095158."""
    group = {"correct": (1, 0), "lengths": [10, 1010]}
    same(advantages("apo", **group), 1, -1.095158)
    same(advantages("apo", "shaping.stcr.mu=1.00001", **group), 1, -1.009950)


def test_the_easy_term_of_a_grae_by_hand() -> None:
    """p = 0.75, omega 0.75, zscore 0.577350 and -1.732051: 0.75 * 0.577350 + 0.25 * e, where e is
    0.5 / 0.5 in the paper and 0.5 / 0.133976 in the code."""
    group = {"correct": (1, 1, 1, 0), "lengths": [1, 1, 1, 1]}
    by_paper = 0.75 * 0.577350 + 0.25
    by_code = 0.75 * 0.577350 + 0.25 * 3.732023
    zscores = vector(*[0.577350] * 3, -1.732051)
    same(advantages("a_grae_ddas", **group), *(by_paper * zscores).tolist())
    released = advantages("a_grae_ddas", "shaping.ddas.easy_form=released", **group)
    same(released, *(by_code * zscores).tolist())


def cards() -> dict[str, str]:
    """The text on released code at the head of each method."""
    texts = {}
    for path in (conf_dir() / "method").glob("*.yaml"):
        head = re.sub(r"\n#\s+", " ", path.read_text())
        (texts[path.stem],) = re.findall(r"released code: (.*)", head)
    return texts


@pytest.mark.parametrize(("name", "text"), sorted(cards().items()))
def test_the_options_that_a_card_names_exist(name: str, text: str) -> None:
    options = re.findall(r"[a-z_.]+=[\w.]+", text)
    method = [option.rstrip(".") for option in options if not option.startswith("trainer.")]
    if method:
        assert load_method(name, method).config != load_method(name).config


def test_every_method_is_compared() -> None:
    assert not [name for name, text in cards().items() if "not compared" in text]
