"""Several turns on the real engines: sampler and policy agree on every sampled token, planted
mistakes are found, and a run that was killed ends as one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from megatron_rl.reporting.metrics import metric
from megatron_rl.rollouts.environments.turns import ENDS
from tests.e2e.toy import LETTERS, VOCAB, overrides, rows, timeless, without
from tests.e2e.turns import AGENT, BOUND, SETTINGS, words_of_turns, write_turns
from tests.launch import REPO, end, launch, torchrun

pytestmark = pytest.mark.timeout(900)
full = pytest.mark.full
CONTEXT = ("parallel=single", "parallel.context=2", "rollout.tensor=1")
PARTIAL = (
    *("rollout.tensor=1", "source.partial.groups_in_flight=14", "source.partial.max_age=2"),
    "env.max_turns=2",
    *("method.mismatch.kind=tis", "method.mismatch.cap=2.0", "mismatch_limits.abort_above=null"),
)
CALLS_BEFORE = (60, 140)  # of environments, since a start; a step has about 80


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_turns(tmp_path_factory.mktemp("turns"))


def train(place: Path, name: str, *more: str) -> Path:
    run_dir = place / name
    launch("megatron_rl.train", 2, words_of_turns(place, run_dir, *more), 400)
    return run_dir


def gaps(tensors: dict[str, Tensor], sampled: Tensor) -> Tensor:
    """Of each token that counts as sampled, how far sampler and policy are apart."""
    old, sampler = tensors["old_logprobs"], tensors["sampler_logprobs"]
    return (old - sampler)[sampled].abs()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Prompts are shared and sequences packed, but where it says otherwise.
        pytest.param("tensor", (), marks=full),
        pytest.param("data", ("parallel=single", "rollout.tensor=1"), marks=full),
        pytest.param("pipeline", ("parallel=pp2", "rollout.tensor=1"), marks=full),
        pytest.param("context", CONTEXT, marks=full),
        pytest.param("unshared", ("batch.share_prompts=false",), marks=full),
    ],
)
def test_sampler_and_policy_agree_over_turns(place: Path, name: str, layout: Sequence[str]) -> None:
    run_dir = train(
        *(place, name, "trainer.num_steps=3", "method.kl.coef=0.01"),
        *("nonfinite.bundle_step=1", "trainer.epochs_per_rollout=2", *layout),
    )
    steps = [row for row in rows(run_dir) if row["step"]]
    for row in steps:
        assert [key for key in row if metric(key) is None] == []
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert row["environment/turns"] > 2 and row["optim/grad_norm"] > 0
    assert sum(row["reward/excluded_share"] for row in steps) > 0, "an environment has failed"
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for one in samples:
        assert "".join(turn["text"] for turn in one["turns"]) == one["response"]
        assert one["ended_by"] in ENDS
    assert max(len(one["turns"]) for one in samples) >= 5
    (file,) = (run_dir / "nonfinite" / "step_000001").rglob("batch.safetensors")
    tensors = load_file(file)
    sampled = tensors["sampled"]
    parts = sampled.split(tensors["response_lengths"].tolist())
    num_turns = [int((~part[:-1] & part[1:]).sum()) + 1 for part in parts]
    assert max(num_turns) >= 3
    assert int(tensors["num_sampled"].sum()) <= int(sampled.sum()) < len(sampled)
    assert gaps(tensors, sampled).max() <= BOUND
    # Planted: each token appended counts, all is one index off, and so is one response alone.
    assert gaps(tensors, torch.ones_like(sampled)).max() > 100 * BOUND
    assert gaps(tensors, sampled.roll(1)).max() > 100 * BOUND
    assert gaps(tensors, sampled.roll(-1)).max() > 100 * BOUND
    check_by_transformers(place / "model", tensors)


@full
@pytest.mark.parametrize(
    ("name", "more"),
    [
        (
            "annealed",
            (
                *("rollout.anneal.start=1.5", "rollout.anneal.end=0.5"),
                *("rollout.anneal.decay_tokens=20.0", "rollout.anneal.policy=annealed"),
            ),
        ),
        ("kept", ("rollout.top_p=0.9", "rollout.top_k=8", "rollout.temperature=0.8")),
        ("hooks", ("rollout_hooks.vcrl.kappa=0.2", "rollout_hooks.dars.schedule=hw")),
        # Weights hardly change, so tokens of several steps are all of one policy.
        ("partial", (*PARTIAL, "optim.learning_rate=1.0e-12")),
    ],
)
def test_other_ways_of_sampling_agree_over_turns(
    place: Path, name: str, more: Sequence[str]
) -> None:
    """A temperature that falls over the whole response, over what is appended too; tokens that the
    sampler kept; groups that grow or are refused; responses that go on in the next step."""
    steps = rows(train(place, name, "trainer.num_steps=3", *more))[1:]
    # The sampler often leaves the end of a message out of the tokens that it keeps.
    assert max(row["environment/turns"] for row in steps) > (
        1.1 if name in ("kept", "partial") else 2
    )
    for row in steps:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert 0 < row["optim/grad_norm"] < 1e3
        if name == "partial":
            assert row["source/mixed_share"] > 0 or row["step"] == 1
        elif name == "hooks":
            assert row["hook/dars/hard_groups"] + row["hook/vcrl/refused_groups"] > 0
        else:
            assert row["environment/ended_by/problem"] < 1


@full
def test_a_stop_text_ends_a_turn(place: Path) -> None:
    """The end of its message is appended behind it, and nothing else is other than at an end that
    was sampled."""
    more = ("trainer.num_steps=3", "rollout.stop=[h,ab]", "nonfinite.bundle_step=1")
    run_dir = train(place, "stop", *more)
    for row in [row for row in rows(run_dir) if row["step"]]:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND and row["environment/turns"] > 2
    (file,) = (run_dir / "nonfinite" / "step_000001").rglob("batch.safetensors")
    tensors = load_file(file)
    check_by_transformers(place / "model", tensors)
    stops = []
    end = VOCAB.index("<eos>")
    by_row = tensors["response_lengths"].tolist()
    lengths = (tensors["prompt_lengths"] + tensors["response_lengths"]).tolist()
    wholes = tensors["token_ids"].split(lengths)
    for whole, flags in zip(wholes, tensors["sampled"].split(by_row), strict=True):
        ids, flags = whole[-len(flags) :].tolist(), flags.tolist()
        for at in range(1, len(ids)):
            if flags[at - 1] and not flags[at]:
                assert (ids[at - 1] == end) != (ids[at] == end), "one end in every turn"
                text = "".join(VOCAB[token] for token in ids[:at])
                stops += [text[-1]] * (ids[at] == end)
                assert ids[at] != end or text.endswith(("h", "ab"))
    assert {"h", "b"} == set(stops) and len(stops) > 10


@full
@pytest.mark.parametrize("layout", [(), ("parallel=single", "rollout.tensor=1"), CONTEXT])
def test_turns_are_credited_as_by_a_plain_count(place: Path, layout: Sequence[str]) -> None:
    """GiGPO with F_norm = 1, of responses that may lie on other ranks."""
    run_dir = train(
        *(place, f"gigpo{len(str(layout))}", "method=gigpo", "trainer.num_steps=1"),
        *("method.token_shaping.gigpo.turn_norm=none", "nonfinite.bundle_step=1", *layout),
    )
    (row,) = (row for row in rows(run_dir) if row["step"])
    assert row["optim/grad_norm"] > 0
    (file,) = (run_dir / "nonfinite" / "step_000001").rglob("batch.safetensors")
    tensors = load_file(file)
    whole = tensors["token_ids"].split(
        (tensors["prompt_lengths"] + tensors["response_lengths"]).tolist()
    )
    turns = []  # row, where each begins, how many follow, what was told
    for number, flags in enumerate(tensors["sampled"].split(tensors["response_lengths"].tolist())):
        ids = whole[number][int(tensors["prompt_lengths"][number]) :].tolist()
        begins = [at for at in range(len(ids)) if flags[at] and (not at or not flags[at - 1])]
        ends = [next(at for at in range(b, len(ids)) if not flags[at]) for b in begins[:-1]]
        told = [(), *(tuple(ids[a:b]) for a, b in zip(ends, begins[1:], strict=True))]
        behind = range(len(begins) - 1, -1, -1)
        turns += [(number, *each) for each in zip(begins, behind, told, strict=True)]
    by_state: dict[object, list[float]] = {}
    for number, _, later, told in turns:
        key = (int(tensors["group_ids"][number]), told)
        by_state.setdefault(key, []).append(0.95**later * float(tensors["rewards"][number]))
    starts = tensors["response_lengths"].cumsum(0) - tensors["response_lengths"]
    credited = 0
    for number, begin, later, told in turns:
        others = by_state[int(tensors["group_ids"][number]), told]
        wanted = 0.95**later * float(tensors["rewards"][number]) - sum(others) / len(others)
        found = float(tensors["token_column.turn_advantages"][int(starts[number]) + begin])
        assert abs(found - wanted) < 1e-6
        credited += found != 0
    assert credited > 10 and max(later for _, _, later, _ in turns) >= 3


@torch.no_grad()
def check_by_transformers(path: Path, tensors: dict[str, Tensor]) -> None:
    """All that was sampled in the first step, read in one pass: as likely as the engine said. With
    one token of a first turn encoded otherwise, no more."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    lengths = tensors["prompt_lengths"] + tensors["response_lengths"]
    wholes = tensors["token_ids"].long().split(lengths.tolist())
    prompts = tensors["prompt_lengths"].tolist()
    by_row = tensors["response_lengths"].tolist()
    planted = 0
    for whole, prompt, sampled, logprobs in zip(
        wholes,
        prompts,
        tensors["sampled"].split(by_row),
        tensors["sampler_logprobs"].split(by_row),
        strict=True,
    ):
        for is_wrong in (False, True):
            read = whole.clone()
            if is_wrong:
                read[prompt] = 2 + (read[prompt] - 1) % len(LETTERS)
            logits = model(read[None]).logits[0, prompt - 1 : -1]
            right = logits.log_softmax(-1).gather(1, whole[prompt:, None])[:, 0]
            # Of the turns behind the first one: that it is another token is not what is meant.
            later = sampled & (sampled.cumprod(0) == 0)
            gap = (right - logprobs).abs()
            if not is_wrong:
                assert gap[sampled].max() <= BOUND
            elif later.any():
                planted += 1
                assert gap[later].max() > 100 * BOUND
    assert planted > 10


@full
def test_an_agent_is_trained_by_its_own_calls(place: Path) -> None:
    """What it is answered is what is sampled, and what is trained is that alone."""
    (place / "agent.py").write_text(AGENT)
    tasks = [{"word": word, "answer": word[-1]} for word in ("ab", "bc", "cd", "de", "ef", "fg")]
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    agent = f"{sys.executable} {place}/agent.py {{word}}"
    record = [sys.executable, str(REPO / "tools" / "record_agent.py"), "--agent", agent]
    subprocess.run([*record, "--out", place / "rows", place / "tasks.jsonl"], check=True, cwd=REPO)
    run_dir = place / "agent"
    data = [f"data.{name}={place}/rows/rows.jsonl" for name in ("train", "eval")]
    more = ("env=agent", f"env.agent='{agent}'", *data, "data.drop_eval_overlap=false")
    more += ("trainer.num_steps=2", "nonfinite.bundle_step=1")
    launch("megatron_rl.train", 2, overrides(place, run_dir, *SETTINGS, *more), 400)
    for row in [row for row in rows(run_dir) if row["step"]]:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert row["environment/turns"] > 1 and row["reward/excluded_share"] == 0
        assert row["environment/ended_by/done"] > 0
    (file,) = (run_dir / "nonfinite" / "step_000001").rglob("batch.safetensors")
    check_by_transformers(place / "model", load_file(file))


def killed_in_a_call(place: Path, number: int, *more: str) -> None:
    """Starts the run ``killed``, and kills all of it while an environment answers: the
    ``number``-th time that one is asked."""
    (place / "hang_at").write_text(str(number))
    command = torchrun("megatron_rl.train", 2) + words_of_turns(place, place / "killed", *more)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with (place / "killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 200
        while not (place / "hangs").exists():
            assert process.poll() is None, (place / "killed.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    finally:
        end(process)
        for name in ("hang_at", "hangs", "calls"):
            (place / name).unlink(missing_ok=True)


@full
@pytest.mark.parametrize(("kills", "source"), [(4, ()), (2, PARTIAL)])
def test_a_run_that_was_killed_in_calls_continues_bit_for_bit(
    tmp_path: Path, kills: int, source: Sequence[str]
) -> None:
    """And what it has learned is evaluated, and shown, in turns."""
    place = write_turns(tmp_path)
    more = ("trainer.num_steps=6", "checkpoint.every_steps=1", "evaluation.at_end=true", *source)
    whole = train(place, "whole", *more)
    rng = random.Random(0)
    for _ in range(kills):
        killed_in_a_call(place, rng.randint(*CALLS_BEFORE), *more)
    killed = train(place, "killed", *more)
    # What was sampled beyond the level of a step, and is dropped, is a matter of timing.
    found, expected = (
        [without(timeless(row), "tokens/discarded") for row in rows(each)]
        for each in (killed, whole)
    )
    assert found == expected
    weights = [load_file(path / "export" / "model.safetensors") for path in (whole, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if source:
        return
    plugin = ["--plugin", str(place / "letters.py")]
    launch("megatron_rl.evaluate", 2, [*plugin, whole], 200)
    (row,) = rows(whole / "evaluation")
    last = rows(whole)[-1]
    assert row["eval/accuracy"] == last["eval/accuracy"]
    assert row["eval/response_tokens_mean"] == last["eval/response_tokens_mean"]
    shown = launch("megatron_rl.sample", 2, [*plugin, whole], 200)
    assert "of 4 answers are correct" in shown.stdout
    assert "add env.name=single" in talked(*plugin, str(whole), "--chat")
    more = ("env.name=single", "rollout.max_prompt_tokens=40", "rollout.max_response_tokens=8")
    lines = talked(*plugin, str(whole), "--chat", *more).splitlines()
    assert sum(line.startswith("you: model: ") for line in lines) == 2, lines


def talked(*words: str) -> str:
    """What is printed in a conversation of two messages."""
    command = [sys.executable, "-m", "megatron_rl.sample", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        command,
        input="a\nb\n\n",
        capture_output=True,
        text=True,
        cwd=REPO,
        env=environment,
        timeout=200,
        check=False,
    )
    return done.stdout + done.stderr
