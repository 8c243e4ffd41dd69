"""Progress is taken from what the engine's own loop returns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.engine.watch import watched


class Engine:
    """Two requests of two responses; the first of them is done a step earlier."""

    def __init__(self) -> None:
        two = [SimpleNamespace(token_ids=[1, 2, 3]), SimpleNamespace(token_ids=[1])]
        done = SimpleNamespace(finished=True, outputs=two)
        running = SimpleNamespace(finished=False, outputs=two)
        self.results = [[running, done], [done]]

    def step(self) -> list:
        return self.results.pop(0)


def test_finished_requests_are_counted_and_results_pass_unchanged():
    engine, told = Engine(), []
    expected = [list(result) for result in engine.results]
    with watched(engine, lambda *progress: told.append(progress)):
        assert [engine.step(), engine.step()] == expected
    assert told == [(2, 4), (4, 8)]
    assert "step" not in vars(engine), "the engine is as before"


def test_an_error_leaves_the_engine_as_before():
    engine = Engine()
    with pytest.raises(RuntimeError), watched(engine, lambda *progress: None):
        raise RuntimeError
    assert "step" not in vars(engine)
