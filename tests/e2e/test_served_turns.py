"""Several turns on vLLM servers: as those of engines in the trainer, whoever serves."""

from __future__ import annotations

import re

import pytest

from tests.e2e import test_servers
from tests.e2e.test_servers import ANNEALED, TRUNCATED, replayed, steps_of
from tests.e2e.toy import rows
from tests.e2e.turns import write_turns

servers, register = test_servers.servers, test_servers.register
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_turns_of_free_servers_are_of_several_weights_and_computed_again(folder, register):
    letters = write_turns(folder / "free_letters")
    more = ["--plugin", str(letters / "letters.py"), f"model.path={letters / 'model'}"]
    more += ["env.name=letters", "reward.max_excluded_share=0.5", "trainer.num_steps=5"]
    run_dir = folder / "free_turns"
    register(0, run_dir)
    register(1, run_dir)
    steps_of(run_dir, *more, "source.schedule=free", "source.staleness=2")
    found = rows(run_dir)
    assert all(row["environment/turns"] > 1.1 for row in found)
    assert 0 < max(row["source/staleness_max"] for row in found) <= 2
    said = replayed(run_dir, "--step", 5, "--after", 0)
    assert len(re.findall(r"\d+ metrics: all equal to those of the run", said)) == 5


def test_turns_are_those_of_the_colocated_engine_and_the_same_whoever_serves(folder, register):
    letters = write_turns(folder / "letters")
    more = ["--plugin", str(letters / "letters.py"), f"model.path={letters / 'model'}"]
    more += ["env.name=letters", "reward.max_excluded_share=0.5", "trainer.num_steps=4"]
    register(0, folder / "several_servers")
    steps = steps_of(folder / "several_servers", *more, "source.staleness=0")
    colocated = ("source=colocated", "source.staleness=0")
    assert steps == steps_of(folder / "several_colocated", *more, *colocated)
    assert all(row["environment/turns"] > 1.1 for row in steps)
    hooks = ("rollout_hooks.vcrl.kappa=0.2", "rollout_hooks.dars.schedule=hw")
    others = {"cut": (*ANNEALED, *TRUNCATED), "hooks": hooks, "stop": ("rollout.stop=[h]",)}
    for name, sampled in others.items():
        register(0, folder / f"{name}_servers")
        served = steps_of(folder / f"{name}_servers", *more, *sampled, "source.staleness=0")
        assert served == steps_of(folder / f"{name}_colocated", *more, *sampled, *colocated)
        assert served != steps, "it samples otherwise"
    register(0, folder / "several_alone")
    register(0, folder / "several_two")
    register(1, folder / "several_two")
    alone = steps_of(folder / "several_alone", *more)
    assert steps_of(folder / "several_two", *more) == alone
