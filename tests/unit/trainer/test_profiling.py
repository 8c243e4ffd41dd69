"""Traces of chosen steps."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_rl.runtime import profiling
from megatron_rl.runtime.profiling import Profiler


def test_a_run_leaves_traces_of_the_chosen_steps_with_its_phases(build) -> None:
    trainer = build("trainer.num_steps=3", "profile.steps=[1,3]", "evaluation.every_steps=0")
    trainer.run()
    folder = trainer.folder.path / "profile"
    names = [f"step_{step}_rank_0{suffix}" for step in (1, 3) for suffix in (".json.gz", ".txt")]
    assert sorted(path.name for path in folder.iterdir()) == names
    events = json.loads(gzip.decompress((folder / names[0]).read_bytes()))["traceEvents"]
    marked = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"step", "rollout", "logprob", "update", "sync"} <= marked
    assert "Self CPU" in (folder / names[1]).read_text()


def test_a_run_that_is_not_asked_leaves_none(build) -> None:
    trainer = build("trainer.num_steps=1", "evaluation.every_steps=0")
    trainer.run()
    assert not (trainer.folder.path / "profile").exists()


def test_memory_is_recorded_and_the_recording_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The calls: what CUDA records, a machine without it cannot show."""
    calls: list[object] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **words: calls.append(words)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    with Profiler([2], "memory", tmp_path, 5).step(2):
        calls.append("step")
    with pytest.raises(KeyError), Profiler([2], "memory", tmp_path, 5).step(2):
        raise KeyError
    file = str(tmp_path / "step_2_rank_5.pickle")
    assert calls == [{}, "step", file, {"enabled": None}, {}, {"enabled": None}]


def test_nsys_captures_the_step_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captured: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: captured.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: captured.append("stop"))
    monkeypatch.setattr(profiling, "emit_nvtx", nullcontext)
    profiler = Profiler([2], "nsys", tmp_path, 0)
    for step in (1, 2):
        with profiler.step(step):
            captured.append(f"step {step}")
    assert captured == ["step 1", "start", "step 2", "stop"]
