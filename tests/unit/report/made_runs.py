"""Run folders as a training leaves them, with made-up curves: real settings, no training."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from tools.reporting.runs import Found, find_runs
from tools.reporting.variants import Variant, variants_of

EVERY = 5  # steps between evaluations
SOURCES = ("sums", "words")
Row = dict[str, Any]


@functools.cache
def _settings(overrides: tuple[str, ...]) -> str:
    words = ["experiment=quickstart_cpu", "model.path=toy", "run_dir=runs/a"]
    words += ["evaluation.stop_after=9", *overrides]  # so that a run may end before its last step
    config = validate(Config, compose("config", words), "a made-up run")
    return json.dumps(config.model_dump(mode="json"))


def record(seed: int = 1, num_steps: int = 20, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """``config.json`` of a run with these overrides."""
    return json.loads(_settings(tuple(overrides))) | {
        "seed": seed,
        "trainer": json.loads(_settings(tuple(overrides)))["trainer"] | {"num_steps": num_steps},
        "versions": {"torch": "2.13.0+cpu", "apex": None},
        "plugins": {},
        "git_commit": "0123456789abcdef",
        "world_size": 2,
        "model_fingerprint": "aa",
        "data_fingerprint": "10:bb",
    }


def curve_rows(seed: int, num_steps: int, gain: float = 0.3) -> list[Row]:
    """Rows of a run whose accuracy rises by about ``gain``; the same for the same arguments."""
    rng = np.random.default_rng([seed, int(gain * 1e6)])
    rows: list[Row] = []
    for step in range(num_steps + 1):
        row: Row = {"step": step}
        level = 0.2 + gain * (1 - np.exp(-3 * step / num_steps)) + rng.normal(0, 0.01)
        if step:
            row |= _training(rng, level, step / num_steps)
        if step % EVERY == 0 or step == num_steps:
            row |= _held_out(rng, level)
        rows.append(row)
    return rows


def few_rows(num_steps: int) -> list[Row]:
    """Rows with two metrics, for a report that is drawn quickly."""
    return [
        {"step": step, "reward/mean": 0.5, "eval/accuracy": 0.5} for step in range(num_steps + 1)
    ]


def _training(rng: np.random.Generator, level: float, progress: float) -> Row:
    noise = rng.normal(0, 0.03, 8)
    return {
        "reward/mean": level + noise[0],
        "reward/accuracy": level + noise[0],
        "rollout/num_responses": 128,
        "rollout/response_tokens_mean": 300 + 200 * progress + 100 * noise[1],
        "rollout/response_tokens_correct_mean": 250 + 150 * progress + 100 * noise[2],
        "rollout/response_tokens_wrong_mean": 350 + 300 * progress + 100 * noise[3],
        "rollout/truncated_share": abs(noise[4]),
        "rollout/entropy": 0.6 - 0.3 * progress + noise[5] / 4,
        "kl/reference_mean": 0.1 * progress + abs(noise[6]) / 9,
        "policy/kl_old_mean": abs(noise[6]) / 100,
        "policy/clip_up_positive_share": abs(noise[7]) / 20,
        "policy/clip_down_negative_share": abs(noise[6]) / 20,
        "policy/clip_down_positive_share": 0.0,
        "policy/clip_up_negative_share": 0.0,
        "optim/grad_norm": 1 + 10 * abs(noise[1]),
        "time/step_s": 2.0 + noise[2],
        "throughput/response_tokens_per_s": 900 + 1000 * noise[3],
        "throughput/discarded_tokens_share": 0.0,
    }


def _held_out(rng: np.random.Generator, level: float) -> Row:
    passes = {f"eval/pass_at_{k}": 1 - (1 - level) ** k for k in (1, 2, 4, 8, 16)}
    by_source = {
        f"eval/accuracy/{source}": level + rng.normal(0.1 * sign, 0.01)
        for source, sign in zip(SOURCES, (1, -1), strict=True)
    }
    held_out = {"eval/accuracy": level + rng.normal(0, 0.005), **passes, **by_source}
    return held_out | {"eval/response_tokens_mean": 310.0, "time/evaluation_s": 3.0}


def write_run(
    folder: Path,
    rows: Sequence[Row],
    *,
    samples: Sequence[Row] = (),
    finished: bool = True,
    change: Callable[[dict[str, Any]], None] | None = None,
    **of_record: Any,
) -> Path:
    """A run folder; ``change`` edits its ``config.json``, ``of_record`` goes to ``record``."""
    folder.mkdir(parents=True, exist_ok=True)
    content = copy.deepcopy(record(**of_record)) | {"run_dir": str(folder)}
    if change is not None:
        change(content)
    (folder / "config.json").write_text(json.dumps(content, indent=2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    if finished:
        (folder / "curves.png").write_bytes(b"")
    return folder


def sample(step: int, correct: bool, response: str) -> Row:
    """A line of ``samples.jsonl``."""
    return {
        "step": step,
        "prompt": "sums:1",
        "prompt_text": "3 + 4 =",
        "response": response,
        "answer": "7",
        "reward": float(correct),
        "correct": correct,
        "truncated": False,
    }


def write_grid(
    place: Path, overrides: Sequence[Sequence[str]], seeds: Sequence[int], num_steps: int = 20
) -> Path:
    """One run for each of the overrides and seeds."""
    for index, words in enumerate(overrides):
        gain = 0.2 + 0.3 * index / max(1, len(overrides) - 1)
        for seed in seeds:
            write_run(
                place / f"variant{index}_seed-{seed}",
                curve_rows(seed, num_steps, gain),
                samples=[
                    sample(step, correct, f"<b>{correct}</b> {step}")
                    for step in (1, num_steps)
                    for correct in (True, False)
                ],
                seed=seed,
                num_steps=num_steps,
                overrides=words,
            )
    return place


def found_in(*places: Path) -> Found:
    """``find_runs`` as the program calls it."""
    return find_runs(places)


def variants_in(*places: Path) -> list[Variant]:
    """``variants_of`` as the program calls it."""
    return variants_of(found_in(*places).runs)
