"""The reward function and the verifier of examples/plugins as they stand, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.plugins import import_function, load_plugins
from megatron_rl.rewards import Options, Task, registry
from tests.launch import REPO

PLUGINS = REPO / "examples" / "plugins"
OPTIONS = Options(partial_credit=False, timeout_s=5.0, memory_bytes=1 << 30, sandbox="bubblewrap")


def task(answer: str) -> Task:
    return Task(uid="p", answer=answer, data_source="words/backward")


def test_letters_in_place():
    """klam has k, l and m where klim has them; a fifth letter makes it 4 of 5."""
    score = import_function(f"{PLUGINS}/letters_in_place.py:score", "reward.function")
    answers = ["klim"] * 4
    found = score([task(answer) for answer in answers], ["klam", " klim ", "klims", ""])
    assert found == [
        {"reward": 0.75, "accuracy": 0.0},
        {"reward": 1.0, "accuracy": 1.0},
        {"reward": 0.8, "accuracy": 0.0},
        {"reward": 0.0, "accuracy": 0.0},
    ]


@pytest.fixture
def own_verifiers():
    classes, sources = dict(registry._classes), list(registry._sources)
    yield
    registry._classes.clear()
    registry._classes.update(classes)
    registry._sources[:] = sources


@pytest.mark.usefixtures("fresh_registries", "own_verifiers")
def test_any_case():
    load_plugins([str(PLUGINS / "any_case.py")])
    assert registry.verifier_of_source("words/backward") == "any_case"
    verifier = registry.verifier_class("any_case")(OPTIONS)
    assert verifier.verify(task("klim"), " K li M").accuracy == 1
    assert verifier.verify(task("klim"), "kilm").accuracy == 0
