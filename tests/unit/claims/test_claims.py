"""Claims of papers: verdicts by hand, cells that are matched, and the tasks they are tried on."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from examples.claims.lab import tasks
from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.keys import flat, within
from megatron_rl.config.schema import Config
from megatron_rl.plugins import load_plugins
from megatron_rl.sweeping.trials import check as check_configs
from tools.claim_checks import (
    Check,
    Claim,
    Outcome,
    holm,
    needed,
    outcomes,
    overall,
    p_different,
    p_within,
    read_claim,
    smallest_decided,
    tally,
)
from tools.claim_page import told
from tools.claims import CLAIMS, block_means, name_of, train_file

FOLDERS = sorted(file.parent for file in CLAIMS.rglob("claim.yaml"))
NAMES = [name_of(folder) for folder in FOLDERS]


def outcome(check: Check, of_cells) -> Outcome:
    """Of a claim with this check alone."""
    return outcomes([check], of_cells)[0]


def runs(first: list[float], second: list[float], metric: str = "m"):
    """Two cells, a last value a seed; an earlier step with another one."""
    return {
        cell: {seed: {metric: {10: 0.5, 20: value}} for seed, value in enumerate(values)}
        for cell, values in (("a", first), ("b", second))
    }


def test_a_pair_is_a_seed() -> None:
    """Seeds differ by far more than the cells; their differences are 0.1, 0.2 and 0.3."""
    found = outcome(Check(metric="m", more="a", less="b"), runs([0.3, 5.2, 9.3], [0.2, 5.0, 9.0]))
    half = 4.302653 * 0.1 / 3**0.5  # t(0.975, 2) of the table, sample deviation 0.1
    assert found.student.mean == pytest.approx(0.2)
    assert found.student.low == pytest.approx(0.2 - half, abs=1e-6)
    assert found.verdict == "undecided"


def test_a_seed_that_one_cell_lacks_is_left_out() -> None:
    of_cells = runs([1.0, 1.1, 1.2], [0.0, 0.1])
    assert outcome(Check(metric="m", more="a", less="b"), of_cells).seeds == (0, 1)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([1.0, 1.1, 1.2], [0.0, 0.11, 0.2], "superior"),
        ([0.0, 0.11, 0.2], [1.0, 1.1, 1.2], "inferior"),
        ([0.0, 1.0, 0.5], [0.5, 0.4, 0.6], "undecided"),
    ],
)
def test_order(first, second, verdict) -> None:
    assert outcome(Check(metric="m", more="a", less="b"), runs(first, second)).verdict == verdict


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ([1.001, 1.0, 0.999], "equivalent"),
        ([1.201, 1.2, 1.199], "superior"),
        ([0.8, 1.0, 1.2], "undecided"),
        ([1.0499, 1.05, 1.0501], "superior"),  # on the margin
    ],
)
def test_sameness_needs_a_margin(second, verdict) -> None:
    found = outcome(Check(metric="m", same=("b", "a"), within=0.05), runs([1.0] * 3, second))
    assert found.verdict == verdict


def test_p_values_by_hand() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 on 2 degrees of freedom, where the upper
    tail is (1 - t / sqrt(t^2 + 2)) / 2 = 0.03709. Beside a margin of 4 t is -3.4641 above, and
    beyond it below."""
    tail = (1 - 12**0.5 / 14**0.5) / 2
    assert p_different([1.0, 2.0, 3.0]) == pytest.approx(2 * tail)
    assert p_within([1.0, 2.0, 3.0], 4.0) == pytest.approx(tail)
    assert p_within([-1.0, -2.0, -3.0], 4.0) == pytest.approx(tail)
    assert p_different([0.0, 0.0]) == 1
    assert p_different([0.5, 0.5]) == 0
    assert p_within([0.5, 0.5], 0.5) == 1
    assert p_within([0.5, 0.5], 0.6) == 0


def test_holm_by_hand() -> None:
    """0.01 times 3, 0.02 times 2, and 0.03 no less than what came before."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def test_a_claim_of_several_checks_corrects_them() -> None:
    """1, 2, 3, 4 has t = 2.5 / (1.2910 / 2) = 3.8730 on 3 degrees of freedom, p = 0.0305: decided
    alone, and not as the smaller of two."""
    of_cells = runs([1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    unclear = runs([1.0, -1.0, 2.0, -2.0], [0.0] * 4, "n")
    both = {
        cell: {seed: metrics | unclear[cell][seed] for seed, metrics in of_cells[cell].items()}
        for cell in of_cells
    }
    check = Check(metric="m", more="a", less="b")
    assert p_different([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.0305, abs=1e-4)
    assert outcome(check, both).verdict == "superior"
    found = outcomes([check, Check(metric="n", more="a", less="b")], both)
    assert [one.verdict for one in found] == ["undecided", "undecided"]


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ([1.001, 1.0, 0.999], "equivalent"),  # within 0.05, half of the effect
        ([1.012, 1.010, 1.011], "superior"),  # less than half of the effect, and yet above
        ([1.2, 0.8, 1.0], "undecided"),
    ],
)
def test_less_than_half_of_the_effect_is_none(first, verdict) -> None:
    check = Check(metric="m", more="a", less="b", effect=0.1)
    assert outcome(check, runs(first, [1.0] * 3)).verdict == verdict


def test_power_by_hand() -> None:
    """t(0.975, 11) = 2.2010 and t(0.8, 11) = 0.8755 of the tables: 3.0765 x 0.011 / sqrt(12)."""
    assert smallest_decided(0.011, 12) == pytest.approx(0.009769, abs=2e-6)
    assert smallest_decided(0.011, 1) == float("inf")
    spread = [1.0, 2.0, 3.0]
    found = outcome(Check(metric="m", more="a", less="b"), runs(spread, [0.0] * 3))
    assert found.smallest == pytest.approx((4.302653 + 1.060660) / 3**0.5, abs=1e-5)


def test_seeds_that_a_check_needs_by_hand() -> None:
    """Equivalence within 0.5: (t(0.95) + t(0.9)) / sqrt(n) is (1.6896 + 1.3062) / 6 = 0.4993 of 36
    seeds, and (1.6909 + 1.3070) / 5.9161 = 0.5067 of 35; an effect of 1 needs fewer."""
    assert needed(Check(metric="m", more="a", less="b", effect=1.0), 1.0) == 36
    assert needed(Check(metric="m", same=("a", "b"), within=0.5), 1.0) == 36
    assert needed(Check(metric="m", more="a", less="b", effect=1.0), 0.01) == 12
    assert needed(Check(metric="m", more="a", less="b"), 1.0) is None


def test_steps_are_averaged() -> None:
    check = Check(metric="m", more="a", less="b", steps=(10, 20))
    assert outcome(check, runs([1.5, 1.5], [0.5, 0.5])).student.mean == pytest.approx(0.5)


def test_steps_without_a_value_are_named() -> None:
    check = Check(metric="m", more="a", less="b", steps=(30, 40))
    with pytest.raises(ValueError, match="m: no value at steps 30 to 40, there are 10 to 20"):
        outcome(check, runs([1.0, 1.1], [0.0, 0.1]))


def from_start(steps: dict[str, dict[int, float]]):
    """One seed a value: 0.1 and 0.3 above where it began, whatever another cell does."""
    of_a = [{"m": {0: 0.2, 10: 0.9, 20: 0.3}}, {"m": {0: 0.5, 10: 0.9, 20: 0.8}}]
    return {"a": dict(enumerate(of_a)), "b": {0: steps}}


def test_a_cell_is_compared_with_its_own_start() -> None:
    """Differences 0.1 and 0.3: their mean 0.2, t(0.975, 1) = 12.7062 times 0.1 around it."""
    of_cells = from_start({"m": {0: 7.0, 20: 7.0}})
    risen = outcome(Check(metric="m", more="a", less="start"), of_cells)
    assert risen.seeds == (0, 1)
    assert risen.student.mean == pytest.approx(0.2)
    assert risen.student.high == pytest.approx(0.2 + 1.27062, abs=1e-5)
    fallen = outcome(Check(metric="m", more="start", less="a"), of_cells)
    assert fallen.student.mean == pytest.approx(-0.2)
    of_steps = outcome(Check(metric="m", more="a", less="start", steps=(10, 20)), of_cells)
    assert of_steps.student.mean == pytest.approx((0.4 + 0.35) / 2)
    assert risen.check.text == "m: a above the start of a"


def test_a_fall_below_the_start_can_be_what_the_paper_says() -> None:
    values = [{"m": {0: 0.9, 20: 0.8 + seed / 1000}} for seed in range(3)]
    of_cells = {"a": dict(enumerate(values))}
    assert outcome(Check(metric="m", more="start", less="a"), of_cells).verdict == "superior"
    assert outcome(Check(metric="m", more="a", less="start"), of_cells).verdict == "inferior"


def test_a_metric_without_a_start_is_named() -> None:
    check = Check(metric="m", more="a", less="start")
    with pytest.raises(ValueError, match="m: no value at step 0"):
        outcome(check, runs([1.0, 1.1], [0.0, 0.1]))


def three_outcomes() -> tuple[Outcome, Outcome, Outcome]:
    """Superior, inferior and undecided, by differences of 1, -1 and around 0."""
    check = Check(metric="m", more="a", less="b")
    good = outcome(check, runs([1.0, 1.1, 1.2], [0.0, 0.1, 0.2]))
    bad = outcome(check, runs([0.0, 0.1, 0.2], [1.0, 1.1, 1.2]))
    return good, bad, outcome(check, runs([1.0, 0.0, 0.5], [0.5, 0.5, 0.5]))


def test_the_whole_verdict_counts_where_checks_differ() -> None:
    good, bad, _ = three_outcomes()
    assert overall([good, good]) == "superior"
    assert overall([good, bad, good]) == "2 superior, 1 inferior"
    assert tally([good, good]) == "2 checks: 2 superior"


def test_a_table_tells_what_was_decided() -> None:
    """The first two, not the one before them, which is open; where all are open, the first."""
    good, bad, open_one = three_outcomes()
    shown = told([open_one, good, bad, good])
    assert shown == (
        "m: a above b: +1.0000 (+1.0000 to +1.0000), superior; "
        "m: a above b: -1.0000 (-1.0000 to -1.0000), inferior"
    )
    assert told([open_one, open_one]).startswith("m: a above b: +0.0000 (-1.2421 to +1.2421), und")


@pytest.mark.parametrize(
    "values",
    [
        {"metric": "m", "more": "a"},
        {"metric": "m", "same": ["a", "b"]},
        {"metric": "m", "more": "a", "less": "b", "same": ["a", "b"], "within": 0.1},
        {"metric": "m", "more": "a", "less": "b", "margin": 0.1},
        {"metric": "m", "more": "start", "less": "start"},
    ],
)
def test_a_check_that_says_nothing_is_refused(values) -> None:
    with pytest.raises(ValidationError):
        Check.model_validate(values)


def test_a_check_of_a_cell_that_is_not_there_is_refused() -> None:
    claim = read_claim(FOLDERS[0]).model_dump()
    claim["checks"] = [{"metric": "m", "more": "nobody", "less": next(iter(claim["cells"]))}]
    with pytest.raises(ValidationError, match="no cell nobody"):
        Claim.model_validate(claim)


def test_no_cell_has_the_name_of_the_start() -> None:
    claim = read_claim(FOLDERS[0]).model_dump()
    claim["cells"] |= {"start": ["method=grpo"]}
    with pytest.raises(ValidationError, match="start stands for the state before training"):
        Claim.model_validate(claim)


@functools.cache  # composed once for all tests
def configs_in(folder: Path) -> dict[str, Config]:
    return configs_of(read_claim(folder))


def configs_of(claim: Claim) -> dict[str, Config]:
    load_plugins([str(claim.plugin)] if claim.plugin else [])
    data = ["model.path=M", "data.train=t.jsonl", "data.eval=e.jsonl"]
    cells = [
        [f"experiment={claim.experiment}", *data, *claim.overrides, *overrides]
        for overrides in claim.cells.values()
    ]
    root = Root(config_dir=CLAIMS / "lab" / "conf")
    configs = check_configs(cells, [Path(name) for name in claim.cells], root)
    return dict(zip(claim.cells, configs, strict=True))


@pytest.mark.usefixtures("fresh_registries")
@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_every_cell_is_a_valid_run(folder: Path) -> None:
    claim = read_claim(folder)
    configs = configs_in(folder).values()
    settings = {config.model_copy(update={"run_dir": None}).model_dump_json() for config in configs}
    assert len(settings) == len(configs)
    longest = min(config.trainer.num_steps for config in configs)
    assert all(check.steps is None or check.steps[1] <= longest for check in claim.checks)


def unmatched(claim: Claim, configs: Mapping[str, Config]) -> set[str]:
    """Keys in which the cells of a check differ, and which the claim does not name."""
    leaves = {cell: dict(flat(config.model_dump())) for cell, config in configs.items()}
    found = set()
    for check in claim.checks:
        for key in set().union(*(leaves[cell] for cell in check.cells)):
            values = [leaves[cell].get(key) for cell in check.cells]
            named = within(key, (*claim.differ, "method.name", "run_dir"))
            if values[0] != values[-1] and not named:
                found.add(key)
    return found


@pytest.mark.usefixtures("fresh_registries")
@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_cells_of_a_check_differ_in_what_the_claim_names_alone(folder: Path) -> None:
    claim = read_claim(folder)
    assert unmatched(claim, configs_in(folder)) == set()


def test_a_baseline_that_is_not_matched_is_seen() -> None:
    """grpo as it is given has a KL, nsr none, and their means over tokens differ."""
    claim = read_claim(CLAIMS / "nsr_keeps_coverage")
    cells = {**claim.cells, "grpo": ("method=grpo",)}
    claim = claim.model_copy(update={"cells": cells})
    assert unmatched(claim, configs_of(claim)) == {"method.kl.coef", "method.aggregate.name"}


def test_right_answers_by_hand() -> None:
    assert tasks.right_answers("sum 13 8") == ["21"]
    assert tasks.right_answers("diff 21 8") == ["13"]
    assert tasks.right_answers("pick 5 not 1") == ["0 5", "2 3", "3 2", "5 0"]
    assert tasks.right_answers("pick 15 not 7") == ["6 9", "9 6"]
    kinds = Counter(prompt.split()[0] for prompt in tasks.prompts())
    assert kinds["sum"] == 900
    assert kinds["diff"] == 465
    assert all(tasks.right_answers(prompt) for prompt in tasks.prompts())


@pytest.mark.parametrize("prompt", ["sum 13 8", "diff 21 8", "pick 9 not 4"])
def test_demonstrations_are_right_as_often_as_said(prompt: str) -> None:
    rng = random.Random(1)
    kind = prompt.split()[0]
    right = tasks.right_answers(prompt)
    shown = [tasks.demonstration(kind, right, rng) for _ in range(4000)]
    share = sum(text in right for text in shown) / len(shown)
    assert share == pytest.approx(tasks.SHARES[kind], abs=0.03)


def test_dots_before_an_answer_say_nothing_of_it() -> None:
    rng = random.Random(1)
    shown = [tasks.thought_about("21", rng) for _ in range(4000)]
    assert {text.lstrip(".") for text in shown} == {"21"}
    dots = [text.count(".") for text in shown]
    assert set(dots) == set(range(17))
    assert sum(dots) / len(dots) == pytest.approx(8, abs=0.3)
    rows = [tasks.row("sum 13 8")] * 4
    asked = [SimpleNamespace(extra=row["extra"]) for row in rows]
    assert tasks.score(asked, [".....21", "21", "2.1", "..22"]) == [1, 1, 0, 0]


def test_only_the_kinds_of_the_claim_are_trained(tmp_path: Path) -> None:
    tasks.write(tmp_path)
    assert train_file(tmp_path, ()) == tmp_path / "train.jsonl"
    lines = train_file(tmp_path, ("sum", "diff")).read_text("ascii").splitlines()
    kinds = Counter(json.loads(line)["prompt"].split()[0] for line in lines)
    assert kinds == {"sum": 900 - 32, "diff": 465 - 32}


def test_five_steps_are_one_value() -> None:
    """A step without the metric, such as 4 here, is no part of the mean."""
    steps, means = block_means([1, 2, 3, 5, 6, 10, 11], [1.0, 2.0, 3.0, 6.0, 5.0, 7.0, 9.0])
    assert steps == [5, 10, 15]
    assert means == [3.0, 6.0, 9.0]
