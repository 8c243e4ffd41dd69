"""Whole runs through the command line a user types, on real Megatron-Core and real vLLM: two
processes, TP2 on both sides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.e2e.toy import overrides, write_large_config
from tests.launch import REPO, end, launch, torchrun
from tests.unit.reporting.wandb_file import read_runs

CONTRACT = """step reward/mean rollout/response_tokens_mean loss/total optim/grad_norm
    mismatch/logprob_abs_diff_mean mismatch/logprob_abs_diff_max time/step_s time/rollout_s
    time/reward_s time/logprob_s time/update_s time/sync_s
    throughput/response_tokens_per_s""".split()


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def timeless(row: dict) -> dict:
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "throughput/", "memory/", "eval/"))
    }


@pytest.fixture
def start(folder) -> Iterator[Callable[..., subprocess.Popen]]:
    """The same command, left running; ended with all its processes when the test is over."""
    processes: list[subprocess.Popen] = []

    def start(run_dir: Path, *more: str, is_warm: bool = False) -> subprocess.Popen:
        command = torchrun("megatron_rl.train")
        command += overrides(folder, run_dir, *more)
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        if is_warm:
            environment["PYTHON_EXEC"] = str(warm.python())
        with (folder / f"{run_dir.name}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=REPO, env=environment
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        end(process)


def wait_for_step(
    process: subprocess.Popen, run_dir: Path, step: int, limit_s: float = 150
) -> None:
    deadline = time.monotonic() + limit_s
    while not (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists():
        assert process.poll() is None, (run_dir.parent / f"{run_dir.name}.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"no step {step} within {limit_s} s"
        time.sleep(0.1)


def ranks(agent: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(agent.pid).children()
        if "megatron_rl.train" in " ".join(child.cmdline())
    ]


@pytest.fixture(scope="module")
def four_steps(folder) -> Path:
    launch(
        "megatron_rl.train",
        2,
        overrides(folder, folder / "four", "trainer.num_steps=4", "checkpoint.every_steps=4"),
        240,
    )
    return folder / "four"


def test_reward_rises_and_the_run_folder_is_complete(folder):
    run_dir = folder / "long"
    done = launch(
        "megatron_rl.train",
        2,
        overrides(
            folder,
            run_dir,
            "trainer.num_steps=20",
            "logging.wandb=offline",
            "logging.tensorboard=true",
        ),
        280,
    )
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(21))
    assert all(key in row for row in metrics[1:] for key in CONTRACT)
    first, last = (
        sum(row["reward/mean"] for row in part) / 3 for part in (metrics[1:4], metrics[-3:])
    )
    assert last > first + 0.4, (first, last)
    assert metrics[-1]["eval/accuracy"] > metrics[0]["eval/accuracy"] + 0.4
    assert max(row["mismatch/logprob_abs_diff_max"] for row in metrics[1:]) < 1e-4
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["batch"]["responses_per_prompt"] == 16
    assert saved["versions"]["megatron-core"]
    assert saved["world_size"] == 2
    assert (run_dir / "curves.png").stat().st_size > 10_000
    assert list(run_dir.glob("tensorboard/*"))
    (in_wandb,) = read_runs(run_dir)
    assert [row["step"] for row in in_wandb.history] == list(range(21)), "its end was not awaited"
    assert done.stdout.count("step 20/20") == 1, "exactly one process writes"
    _check_export(folder, run_dir)


def _check_export(folder: Path, run_dir: Path) -> None:
    """The export opens in transformers and answers as the last evaluation says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_dir / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    tasks = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    right = 0
    for task in tasks:
        chat = [{"role": "user", "content": task["prompt"]}]
        ids = tokenizer(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            return_tensors="pt",
        )["input_ids"]
        right += tokenizer.decode(model(ids).logits[0, -1].argmax()) == task["answer"]
    assert right / len(tasks) == rows(run_dir)[-1]["eval/accuracy"]


def test_two_steps_a_checkpoint_new_processes_and_two_steps_are_four_steps_bit_for_bit(
    folder, four_steps
):
    run_dir = folder / "twice"
    launch(
        "megatron_rl.train",
        2,
        overrides(folder, run_dir, "trainer.num_steps=2", "checkpoint.every_steps=2"),
        240,
    )
    done = launch(
        "megatron_rl.train",
        2,
        overrides(folder, run_dir, "trainer.num_steps=4", "checkpoint.every_steps=4"),
        240,
    )
    assert "resumed from" in done.stdout
    assert [timeless(row) for row in rows(run_dir)] == [timeless(row) for row in rows(four_steps)]
    whole, resumed = (
        load_file(path / "export" / "model.safetensors") for path in (four_steps, run_dir)
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_sample_of_a_run_answers_as_its_last_evaluation_did(folder, four_steps):
    """The newest checkpoint is converted, and one engine over both processes answers greedily."""
    done = launch("megatron_rl.sample", 2, [four_steps, "--num-prompts", "8"], 200)
    accuracy = rows(four_steps)[-1]["eval/accuracy"]
    assert f"{round(accuracy * 8)} of 8 answers are correct" in done.stdout, done.stdout
    asked = [line for line in done.stdout.splitlines() if line.startswith("prompt:")]
    assert asked == [f"prompt:    {letter}?" for letter in "abcdefgh"]


@pytest.mark.full  # in the core tier: the policy alone, in five layouts (numerics/test_offload.py)
def test_offloading_at_every_hand_over_and_around_checkpoints_changes_no_number(folder, four_steps):
    run_dir = folder / "lean"
    lean = [
        "trainer.num_steps=4",
        "checkpoint.every_steps=2",
        "memory.offload=[optimizer,gradients,weights]",
    ]
    launch("megatron_rl.train", 2, overrides(folder, run_dir, *lean), 240)
    assert [timeless(row) for row in rows(run_dir)] == [timeless(row) for row in rows(four_steps)]
    whole, handed = (
        load_file(path / "export" / "model.safetensors") for path in (four_steps, run_dir)
    )
    assert all(torch.equal(whole[name], handed[name]) for name in whole)
    phases = (
        "update",
        "offload",
        "wake_weights",
        "sync",
        "wake_kv_cache",
        "generate",
        "sleep",
        "reload",
    )
    assert all(row[f"memory/{phase}_host_gib"] > 0 for row in rows(run_dir)[1:] for phase in phases)


@pytest.mark.full  # in the core tier: test_errors of tests/distributed
def test_a_killed_rank_ends_the_job_and_the_run_goes_on_from_the_newest_whole_checkpoint(
    folder, four_steps, start
):
    run_dir = folder / "killed"
    agent = start(run_dir, "trainer.num_steps=500", "checkpoint.every_steps=1", "checkpoint.keep=3")
    wait_for_step(agent, run_dir, 3)
    ranks(agent)[1].send_signal(signal.SIGKILL)
    assert agent.wait(30) != 0
    assert (
        "SIGKILL" in (folder / "killed.log").read_text()
        or "Signal 9" in (folder / "killed.log").read_text()
    )
    newest = max(
        path
        for path in (run_dir / "checkpoints").iterdir()
        if path.name.startswith("step_") and path.suffix == ""
    )
    shard = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-8])
    before = int(newest.name.removeprefix("step_")) - 1
    done = launch(
        "megatron_rl.train", 2, overrides(folder, run_dir, f"trainer.num_steps={before + 1}"), 240
    )
    assert done.stdout.count(f"{newest} is skipped: ") == 1, done.stdout[-3000:]
    assert f"resumed from {run_dir}/checkpoints/step_{before:06d}" in done.stdout
    assert [row["step"] for row in rows(run_dir)] == list(range(before + 2))
    common = min(5, before + 2)
    expected = [timeless(row) for row in rows(four_steps)[:common]]
    assert [
        {key: row[key] for key in reference} for row, reference in zip(rows(run_dir), expected)
    ] == expected


def test_preemption_leaves_a_checkpoint_and_a_marker(folder, start):
    run_dir = folder / "preempted"
    settings = ["trainer.num_steps=500", "checkpoint.every_steps=2"]
    agent = start(run_dir, *settings, is_warm=True)
    wait_for_step(agent, run_dir, 2)
    for rank in ranks(agent):
        rank.send_signal(signal.SIGUSR1)
    assert agent.wait(60) == 0, (folder / "preempted.log").read_text()[-3000:]
    step = int((run_dir / "requeue").read_text())
    assert (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists()
    assert rows(run_dir)[-1]["step"] == step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["parallel=tp2", "batch.prompts_per_minibatch=3"],
            r"2 problems in .*\n  - parallel: .*\n  - batch\.prompts_per_mini",
        ),
        (["model.path=/nowhere/model"], "model.path = /nowhere/model: no such folder"),
        (["data.train={folder}/broken.jsonl"], r"broken.jsonl:\n  - row 2: no answer"),
        (
            # neither weights nor tokenizer: it is refused before either is looked for
            ["model.path={folder}/large", "rollout.kv_cache_gib=1"],
            r"memory plan of a rank in GiB .*: weights 270.84, .*\nerror: 1 problem in the memory"
            r" plan \(memory.enforce=false starts all "
            r"the same\):\n  - the run needs \d{4}\.\d GiB on a rank of pipeline stage 0, .* most"
            r" of it is checkpoint_copy \(1083.4 GiB\): set checkpoint.background=false",
        ),
        (
            ["batch.tokens_per_microbatch=1000000000", "batch.responses_per_prompt=50000000"],
            r"most of it is activations .*: lower batch.tokens_per_microbatch \(now 10{9}\)",
        ),
    ],
)
def test_wrong_input_is_one_message_and_a_failed_job(folder, change, message):
    write_large_config(folder / "large")
    (folder / "broken.jsonl").write_text(
        '{"prompt": "a", "answer": "a", "data_source": "x", "extra": {}}\n{"prompt": "b"}\n'
    )
    args = overrides(
        folder,
        folder / "wrong",
        "parallel=single",
        "rollout.tensor=1",
        *(text.format(folder=folder) for text in change),
    )
    command = [str(warm.python()), "-m", "megatron_rl.train", *args]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "wrong").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_steps_do_not_depend_on_the_layout(folder):
    """The same seed and data under tensor, pipeline and data parallelism, and under another layout
    of the engine."""
    layouts = {
        "tp2": ["parallel=tp2"],
        "pp2": ["parallel=pp2"],
        "dp2": ["parallel=single"],
        "dp2_engines": ["parallel=single", "rollout.tensor=1"],
        "engine_stages": [
            "rollout.tensor=1",
            "rollout.pipeline=2",
            "weight_sync.logprob_check_every=0",
        ],
    }
    runs = {}
    for name, change in layouts.items():
        launch(
            "megatron_rl.train",
            2,
            overrides(folder, folder / name, "trainer.num_steps=5", *change),
            240,
        )
        runs[name] = [timeless(row) for row in rows(folder / name)[1:]]
    compared = [
        key
        for key in runs["tp2"][0]
        if key.startswith(("reward/", "loss/", "optim/", "rollout/", "credit/", "policy/"))
    ]
    assert len(compared) > 20
    for name, steps in runs.items():
        for step, expected in zip(steps, runs["tp2"], strict=True):
            assert {key: step[key] for key in compared} == pytest.approx(
                {key: expected[key] for key in compared}, rel=1e-4, abs=1e-4
            ), name
