"""Whether the rows of a step can be spread over the ranks, said at the start."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.planning.balance import IDLE_LIMIT, idle_share, idle_warning


def config(prompts: int, responses: int, *more: str) -> Config:
    overrides = [
        "model.path=m",
        "data.train=t",
        "data.eval=e",
        f"batch.prompts_per_step={prompts}",
        f"batch.prompts_per_minibatch={prompts}",
        f"batch.responses_per_prompt={responses}",
    ]
    return validate(Config, compose("config", [*overrides, *more]), "test")


def test_two_rows_a_rank_leave_half_of_the_machine_idle():
    assert 0.45 < idle_share(1024, 512) < 0.6


def test_one_row_a_rank_is_the_longest_against_the_mean():
    """Mean / longest of the distribution, whose longest is four times its untruncated mean."""
    assert idle_share(4096, 4096) == pytest.approx(1 - 1 / 4, abs=0.05)


def test_idle_time_falls_with_rows_and_rises_with_ranks():
    by_ranks = [idle_share(1024, ranks) for ranks in (64, 256, 350, 512, 1024)]
    assert by_ranks == sorted(by_ranks)
    assert idle_share(64 * 16, 16) < 0.01
    assert idle_share(64, 1) == pytest.approx(0.0, abs=1e-9)


def test_the_warning_says_how_much_and_what_to_do():
    warning = idle_warning(config(128, 8), 512)
    assert warning is not None
    assert warning.startswith(
        "batch.prompts_per_minibatch = 128: 1024 responses over 512 data-parallel ranks are 2.0 a"
    )
    assert "will idle some 54 % of its time" in warning
    remedy = int(warning.partition("raise it to ")[2].partition(",")[0])
    assert idle_warning(config(remedy, 8), 512) is None
    assert idle_share(remedy // 2 * 8, 512) > IDLE_LIMIT


@pytest.mark.parametrize(
    ("prompts", "responses", "world", "more"),
    [(128, 8, 64, ()), (4, 4, 1, ()), (128, 8, 512, ("parallel.context=8",))],
)
def test_nothing_is_said_where_rows_suffice(prompts, responses, world, more):
    assert idle_warning(config(prompts, responses, *more), world) is None


def test_an_enormous_step_is_not_simulated():
    assert idle_warning(config(100_000, 64), 1024) is None
