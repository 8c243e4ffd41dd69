"""Whole runs with images through the command line: Durian with all three of its terms on both real
engines, a resume, and its rollouts on a server; PAPO with its masked images, and a step computed
again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_rl.data.rows import read_rows
from tests.e2e import toy
from tests.launch import REPO, end, launch, run
from tests.numerics.seeing import with_deep_tower
from tests.numerics.server import with_entry_point
from tools.make_toy_vision_model import write_untrained

# Differs between the responses of a model that knows nothing.
REWARD = """
def score(tasks, responses):
    sums = [sum(map(ord, text)) % 7 for text in responses]
    return [{"reward": value / 7, "accuracy": 0.0} for value in sums]
"""
# What vLLM's delta rule for CPUs takes; the tokenizer of Qwen3.5 makes more tokens of a question.
IN_BF16 = (
    "rollout.max_prompt_tokens=96",
    "rollout.dtype=bfloat16",
    "rollout.enable_prefix_caching=false",
    "mismatch_limits.abort_above=0.6",
    "weight_sync.logprob_check_tolerance=0.1",
)
pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    maker = [sys.executable, str(REPO / "tools/make_vision_tasks.py")]
    run([*maker, "--out", str(path), "--train", "64", "--eval", "8"], 200)
    questions = [row["problem"] for _, row in read_rows(path / "train.parquet")]
    options = argparse.Namespace(seed=0, layers=2, hidden=128, tower_hidden=32)
    write_untrained(path / "model", questions, options)
    (path / "reward.py").write_text(REWARD)
    return path


def settings(folder: Path, name: str, num_steps: int, *more: str) -> list[str]:
    return [
        "experiment=vision_cpu",
        "method=durian",
        "reward.verifier=auto",
        f"reward.function={folder / 'reward.py'}:score",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.parquet'}",
        f"data.eval={folder / 'eval.parquet'}",
        f"run_dir={folder / name}",
        f"trainer.num_steps={num_steps}",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=8",
        "checkpoint.every_steps=1",
        "evaluation.every_steps=0",
        "weight_sync.logprob_check_every=1",
        "mismatch_limits.abort_above=1e-4",
        "logging.trackers=[]",
        *more,
    ]


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, name: str, num_steps: int, *more: str) -> list[dict]:
    """The rows of the metrics after a run of two processes to ``num_steps``."""
    launch("megatron_rl.train", 2, settings(folder, name, num_steps, *more), 400)
    return rows(folder, name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl", ()),
        ("qwen3_vl", ("parallel.tensor=2", "parallel.sequence=true", "rollout.tensor=2")),
        ("qwen3_vl_moe", ("parallel.tensor=1", "parallel.expert=2")),
        (
            "qwen3_5_vl",
            ("parallel.tensor=2", "parallel.sequence=true", "rollout.tensor=2", *IN_BF16),
        ),
        ("qwen3_5_moe_vl", ("parallel.tensor=1", "parallel.expert=2", *IN_BF16)),
    ],
    ids=["2.5", "data", "tensor", "experts", "delta", "delta-experts"],
)
def test_durian_of_each_family(folder, family, layout):
    """After every update the engine's logprobs of what it samples are those of the policy."""
    path = folder / f"{family}{len(layout)}"
    shutil.copytree(folder / "model", path / "model")
    if family != "qwen2_5_vl":
        with_deep_tower(path / "model", AutoConfig.from_pretrained(path / "model"), family)
    found = train(folder, f"{path.name}_run", 20, f"model.path={path / 'model'}", *layout)
    steps = [row for row in found if row["step"]]
    largest = max(row["mismatch/logprob_abs_diff_max"] for row in steps)
    print(f"largest |policy - engine| of {len(steps)} steps: {largest:.1e}")
    mean = max(row["mismatch/logprob_abs_diff_mean"] for row in steps)
    print(f"largest mean of a step: {mean:.1e}")
    bounds = (0.6, 5e-3) if "rollout.dtype=bfloat16" in layout else (1e-5, 1e-5)
    assert len(steps) == 20 and largest <= bounds[0] and mean <= bounds[1]


def test_durian_sees_and_goes_on_bit_for_bit(folder):
    whole = train(folder, "whole", 4)
    train(folder, "parts", 2)
    parts = train(folder, "parts", 4)
    assert [row["step"] for row in whole] == [row["step"] for row in parts] == [0, 1, 2, 3, 4]
    assert [toy.timeless(row) for row in whole[1:]] == [toy.timeless(row) for row in parts[1:]]
    for row in whole[1:]:
        assert row["mismatch/logprob_abs_diff_max"] <= 1e-4
        assert row["sync/logprob_check_diff_max"] <= 1e-4 and row["optim/grad_norm"] > 0
    (known,) = json.loads((folder / "parts" / "visual_entropy.json").read_text()).values()
    files = {
        item["bytes"] for _, row in read_rows(folder / "train.parquet") for item in row["images"]
    }
    assert len(known) == len(files)


@contextlib.contextmanager
def serving(folder: Path, words: Sequence[str]) -> Iterator[None]:
    """A server of ``megatron_rl.serve``, which registers for the run by itself."""
    environment = {**os.environ, **with_entry_point(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "server.log").open("w") as log:
        command = [sys.executable, "-m", "megatron_rl.serve", "--lease-s", "120", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPO, env=environment)
    try:
        yield
    finally:
        end(process)


def test_a_server_sees_what_the_engine_in_the_process_sees(folder):
    """In turns with the trainer every number of the steps is that of the colocated engine, and so
    are the logprobs of prompts with images."""
    found = []
    for source in ("servers", "colocated"):
        words = [*settings(folder, source, 2), f"source={source}", "rollout.tensor=1"]
        with serving(folder, words) if source == "servers" else contextlib.nullcontext():
            launch("megatron_rl.train", 2, words, 800)
        found.append(rows(folder, source)[1:])
    of_the_source = ("source/", "sync/bytes", "rollout/unused")
    for served, own in zip(*found, strict=True):
        names = {name for name in toy.timeless(own) if not name.startswith(of_the_source)}
        assert {name: served[name] for name in names} == {name: own[name] for name in names}
        assert served["mismatch/logprob_abs_diff_max"] <= 1e-4
        assert served["sync/logprob_check_diff_max"] <= 1e-4
    assert len(found[0]) == 2


def papo(folder: Path, name: str, num_steps: int, *more: str) -> list[dict]:
    """The rows of the steps of such a run."""
    steps = train(folder, name, num_steps, "method=papo", *more)[1:]
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    for row in steps:
        assert row["mismatch/logprob_abs_diff_max"] <= 1e-4
        assert row["sync/logprob_check_diff_max"] <= 1e-4 and row["optim/grad_norm"] > 0
        assert row["kl/perception_mean"] > 0 and row["entropy/masked_sampled_mean"] > 0
    return steps


def test_papo_masks_images_and_a_step_is_computed_again(folder):
    steps = papo(folder, "papo", 2, "nonfinite.bundle_step=2")
    report = folder / "papo.json"
    bundle = folder / "papo/nonfinite/step_000002"
    launch("tools/replay_step.py", 2, [bundle, "--json", report], 400)
    found = json.loads(report.read_text())["whole"]
    assert found["loss"] == pytest.approx(steps[-1]["loss/total"], rel=1e-6)
    assert found["grad_norm"] == steps[-1]["optim/grad_norm"]


def test_papo_with_masks_of_the_old_policy_goes_on_bit_for_bit(folder):
    """Two minibatches a step: rows are lent with their scores."""
    old = ("method.perception.masked=old", "batch.prompts_per_minibatch=4")
    whole = papo(folder, "papo_old", 2, *old)
    papo(folder, "papo_parts", 1, *old)
    parts = papo(folder, "papo_parts", 2, *old)
    assert list(map(toy.timeless, whole)) == list(map(toy.timeless, parts))
