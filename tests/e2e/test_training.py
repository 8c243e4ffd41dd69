"""Whole runs through the command line a user types, on real Megatron-Core and real vLLM: two
processes, TP2 on both sides."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.e2e.toy import alone, overrides, rows, timeless, write_large_config
from tests.launch import launch
from tests.unit.reporting.wandb_file import read_runs

CONTRACT = """step reward/mean rollout/response_tokens_mean loss/total optim/grad_norm
    mismatch/logprob_abs_diff_mean mismatch/logprob_abs_diff_max time/step_s time/rollout_s
    time/reward_s time/logprob_s time/update_s time/sync_s
    throughput/response_tokens_per_s""".split()


def test_reward_rises_and_the_run_folder_is_complete(folder):
    run_dir = folder / "long"
    done = launch(
        "megatron_rl.train",
        2,
        overrides(
            folder,
            run_dir,
            "trainer.num_steps=20",
            "logging.trackers=[wandb,tensorboard]",
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
            r" plan \(memory.enforce=false starts "
            r"anyway\):\n  - the run needs \d{4}\.\d GiB on a rank of pipeline stage 0, .* most"
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
    texts = [text.format(folder=folder) for text in change]
    done = alone(folder, folder / "wrong", *texts)
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
