"""tools/plan_run.py: its figures by hand where they can be, and what it refuses."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests.unit.planning_of_7b import PARAMETERS, QWEN2_5_7B, config
from tests.unit.qwen2_5_vl import write_config
from tools import plan_run

SEVEN = ["--model", "qwen2.5-7b", "experiment=qwen2_5_7b_8gpu"]


def page(capsys, monkeypatch, *words: str) -> tuple[int, dict[str, str], str]:
    """Exit status, lines by their first word, and what stands on stderr."""
    monkeypatch.setattr(sys, "argv", ["plan_run.py", *words])
    status = plan_run.main()
    printed = capsys.readouterr()
    found: dict[str, str] = {}
    for line in printed.out.splitlines():
        word, _, rest = line.partition(" ")
        found[word] = f"{found.get(word, '')}{rest.strip()}\n"
    return status, found, printed.err


def test_seven_billion_on_a_node(capsys, monkeypatch) -> None:
    status, found, _ = page(capsys, monkeypatch, "--nodes", "1", "--storage-gb-s", "10", *SEVEN)
    assert status == 0
    assert found["engines"] == "4 of tensor 2 x pipeline 1\n"
    # Weights in bfloat16, master weights and two moments in float32, from 8 ranks.
    of_rank = 14 * PARAMETERS / 8 / 1e9
    assert found["checkpoint"].startswith(f"{of_rank:.2f} GB a rank, {8 * of_rank / 10:.1f} s, ev")
    assert "0.0 GB across nodes" in found["sync"]


def test_what_does_not_fit_is_said(capsys, monkeypatch) -> None:
    status, found, _ = page(capsys, monkeypatch, "--nodes", "1", "--gpu-gib", "24", *SEVEN)
    assert status == 1
    assert "NOT FIT: generation needs" in found["DOES"]


def test_the_tail_of_the_lengths_is_what_idles(capsys, monkeypatch) -> None:
    def idle(*words: str) -> float:
        _, found, _ = page(capsys, monkeypatch, "--nodes", "1", *words, *SEVEN)
        return float(found["rollout"].rpartition("idle ")[2].rstrip("%\n"))

    assert idle("--median", "100", "--p99", "3000") > idle("--median", "1000", "--p99", "1000")


def test_an_update_that_sees_each_response_twice_takes_twice_as_long() -> None:
    """In forwards: 3 and the reference's; 2 x 3 and that one; 3, that one and one more."""
    cluster = plan_run.Cluster(1, 8, 80, None, 1, 1, 1, 1, 100)
    one_update = ["batch.prompts_per_step=4", "batch.prompts_per_minibatch=4"]

    def seconds(*method: str) -> float:
        planned = config(*one_update, *method)
        return plan_run.train_seconds(planned, QWEN2_5_7B, cluster, np.full((4, 8), 100))

    grpo = seconds("method=grpo")
    assert seconds("method=papo") == pytest.approx(7 / 4 * grpo)
    old = seconds("method=papo", "method.perception.masked=old")
    assert old == pytest.approx(5 / 4 * grpo)


@pytest.mark.parametrize(("gpus", "rate"), [(8, 100.0), (2, 10.0)])
def test_what_tensor_ranks_send_each_other(gpus: int, rate: float) -> None:
    """Groups of 4 ranks; each sums 56 blocks in 3 passes: forward, backward, the reference's. To
    sum over 4 ranks, each sends 2 x 3/4 of the numbers, of 2 bytes. Within a node over NVLink."""
    cluster = plan_run.Cluster(8 // gpus, gpus, 80, None, 1, 100.0, 10.0, 1, 1)
    planned = config(
        "batch.prompts_per_step=4", "batch.prompts_per_minibatch=4", "parallel.tensor=4"
    )
    lengths = np.full((4, 8), 100)
    tokens_of_group = 32 * (100 + planned.rollout.max_prompt_tokens) / 2
    by_hand = 3 * 56 * 1.5 * tokens_of_group * 3584 * 2 / (rate * 1e9)
    seconds = plan_run.tensor_message_seconds(planned, QWEN2_5_7B, cluster, lengths)
    assert seconds == pytest.approx(by_hand)


def test_what_leaves_for_the_host_comes_back(capsys, monkeypatch) -> None:
    """Weights, 2 bytes over 2 ranks; of the optimizer 12 bytes over all 8; at 25 GB/s."""
    offload = "memory.offload=[weights,gradients,optimizer]"
    words = ["--nodes", "1", *SEVEN, "parallel.tensor=2", offload]
    found = page(capsys, monkeypatch, *words)[1]
    step = float(found["step"].split()[0])
    copies = 2 * PARAMETERS * (2 / 2 + 12 / 8) / 25e9
    share = re.search(r"([\d.]+)%  copies to the host", found[""])
    assert share is not None
    assert float(share[1]) == pytest.approx(100 * copies / step, abs=0.1)


ROOMY = ["--nodes", "1", "--gpu-gib", "640"]
WEIGHTS_GB = 2 * PARAMETERS / 1e9  # in bfloat16


def sync_seconds(line: str) -> float:
    """The least ones."""
    return float(line.rpartition("(least ")[2].rstrip(")\n"))


@pytest.mark.parametrize(
    ("words", "way", "gb_into_a_rank"),
    [
        # Rank 2 has the third quarter of each matrix, and its engine wants the first two.
        (["precision=fp32", "rollout.dtype=float32"], "reshard", 2 * WEIGHTS_GB / 2),
        (["precision=fp32", "weight_sync.method=reshard"], "reshard", WEIGHTS_GB / 2),
        # A gather brings the three quarters that a rank has not, in the policy's own format.
        (["precision=fp32"], "gather", 2 * WEIGHTS_GB * 3 / 4),
        (["rollout=vllm_fp8", "rollout.tensor=2"], "gather", WEIGHTS_GB * 3 / 4),
        (["weight_sync.method=gather"], "gather", WEIGHTS_GB * 3 / 4),
    ],
)
def test_the_sync_is_the_one_that_the_run_takes(
    capsys, monkeypatch, words, way, gb_into_a_rank
) -> None:
    """At 1 GB/s within the node, so that the least seconds are the GB into the busiest rank."""
    status, found, error = page(capsys, monkeypatch, *ROOMY, "--nvlink-gb-s", "1", *SEVEN, *words)
    assert status == 0, error
    assert found["sync"].startswith(f"{way}: 0.0 GB across nodes")
    assert sync_seconds(found["sync"]) == pytest.approx(gb_into_a_rank, rel=0.05)


def test_the_sync_of_engines_of_several_stages(capsys, monkeypatch) -> None:
    """Half of the layers and one end of the model each."""
    words = ("rollout.tensor=1", "rollout.pipeline=2", "weight_sync.logprob_check_every=0")
    status, found, error = page(capsys, monkeypatch, *ROOMY, "--nvlink-gb-s", "1", *SEVEN, *words)
    assert status == 0, error
    assert found["engines"] == "4 of tensor 1 x pipeline 2\n"
    # Of each of the 14 layers a rank has a quarter, and so of one end.
    assert sync_seconds(found["sync"]) == pytest.approx(WEIGHTS_GB / 2 * 3 / 4, rel=0.05)


def test_a_family_without_a_table_is_said(capsys, monkeypatch, tmp_path) -> None:
    model = write_config(tmp_path / "model", "7B")
    words = ["--nodes", "1", "experiment=qwen2_5_vl_7b_8gpu", f"model.path={model}"]
    _, found, error = page(capsys, monkeypatch, *words)
    assert "family 'qwen2_5_vl' has no declared layout" in found["sync"], error
    _, found, _ = page(capsys, monkeypatch, *words, "weight_sync.method=gather")
    assert found["sync"].startswith("gather: 0.0 GB across nodes")


SERVERS = ["source=servers", "--server-nodes", "2"]
OLD_TOKENS = ["method.mismatch.kind=tis", "method.mismatch.cap=2.0"]


def parts(found: dict[str, str]) -> dict[str, float]:
    """Shares of a step by name, and under "step" its seconds."""
    shares = {"step": float(found["step"].split()[0])}
    for line in found[""].splitlines():
        share, _, name = line.partition("%")
        shares[name.removesuffix("  <- limits").strip()] = float(share) / 100
    return shares


def test_servers_are_on_nodes_of_their_own(capsys, monkeypatch) -> None:
    status, found, error = page(capsys, monkeypatch, "--nodes", "1", *SERVERS, *SEVEN)
    assert status == 0, error
    assert found["servers"] == "16 GPUs more: 2 x 8 of 80 GiB\n"
    assert found["engines"] == "8 of tensor 2 x pipeline 1\n"
    # Weights enter each of the two nodes once.
    assert found["sync"].startswith(f"servers: {2 * WEIGHTS_GB:.1f} GB across nodes (the least ")
    servers = found["memory"].splitlines()[-1]
    # 60 % of the GPU is the engine's, and 5 GiB are counted beside it.
    assert servers == "servers: 53.0 GiB of 80"


def test_a_server_without_room_for_a_cache_does_not_fit(capsys, monkeypatch) -> None:
    small = "rollout.gpu_memory_utilization=0.05"
    status, found, _ = page(capsys, monkeypatch, "--nodes", "1", *SERVERS, *SEVEN, small)
    assert status == 1 and "rollout.gpu_memory_utilization = 0.05" in found["DOES"]


def test_servers_sample_while_the_policy_trains(capsys, monkeypatch) -> None:
    def step(*words: str) -> tuple[dict[str, float], str]:
        words = ("--nodes", "1", *SERVERS, *words, *SEVEN)
        status, found, error = page(capsys, monkeypatch, *words)
        assert status == 0, error
        return parts(found), found["rollout"]

    in_turns, _ = step()
    assert "generation" in in_turns
    behind, words = step("source.staleness=1", *OLD_TOKENS)
    assert "while the policy trains, lockstep, staleness 1" in words
    # Training takes longer than sampling here, so that only it and the sync are left of the step.
    assert behind["a policy that waits for responses"] == 0
    updates = ("training", "messages of tensor parallelism", "weight sync")
    share = sum(in_turns[part] for part in updates)
    assert behind["step"] == pytest.approx(in_turns["step"] * share, rel=0.02)
    # Where sampling takes longer, a second step behind gives servers more to do.
    tail = ("--median", "300", "--p99", "3000", "--tflops", "5000", *OLD_TOKENS)
    one_behind, _ = step("source.staleness=1", *tail)
    assert step("source.staleness=2", *tail)[0]["step"] < one_behind["step"]


def test_responses_that_continue_in_the_next_step_leave_less_idle(capsys, monkeypatch) -> None:
    def rollout(*words: str) -> str:
        tail = ("--nodes", "1", "--median", "100", "--p99", "3000")
        return page(capsys, monkeypatch, *tail, *words, *SEVEN)[1]["rollout"]

    partial = rollout("source.partial.groups_in_flight=192", *OLD_TOKENS)
    seconds = r"longest 3072: ([0-9.]+) s"
    assert "others continue in the next step" in partial
    found, plain = re.search(seconds, partial), re.search(seconds, rollout())
    assert found and plain and float(found[1]) < 0.9 * float(plain[1])


def test_engines_share_the_responses_of_a_prompt(capsys, monkeypatch) -> None:
    """48 responses on four engines of four slots: three turns each. In fixed shares of the six
    prompts two engines would have four turns and two have two."""
    batch = ("batch.prompts_per_step=6", "batch.prompts_per_minibatch=6", "rollout.max_num_seqs=4")
    equal = ("--median", "1000", "--p99", "1000")
    _, found, _ = page(capsys, monkeypatch, "--nodes", "1", *equal, *SEVEN, *batch)
    assert found["rollout"].endswith("engines idle 0%\n")


@pytest.mark.parametrize(("background", "waits"), [("true", 0.0), ("false", 1.0)])
def test_what_a_run_waits_for_of_a_checkpoint(capsys, monkeypatch, background, waits) -> None:
    """In the background all of it is held in memory. Every 20 steps."""
    slow = ("--storage-gb-s", "0.1", f"checkpoint.background={background}")
    _, found, _ = page(capsys, monkeypatch, "--nodes", "1", *slow, *SEVEN)
    shares = parts(found)
    seconds = shares["checkpoints that the run waits for"] * shares["step"]
    assert seconds == pytest.approx(waits * 14 * PARAMETERS / 1e8 / 20, rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["source=servers", *SEVEN], "source=servers: say on how many nodes with --server-nodes"),
        (["--server-nodes", "1", *SEVEN], "the engines are on the trainer's GPUs"),
        (
            [*SERVERS, *SEVEN, "rollout.pipeline=7", "weight_sync.logprob_check_every=0"],
            "16 GPUs are no multiple of rollout.tensor x rollout.pipeline = 14",
        ),
        (["--model", "9b", "experiment=qwen2_5_7b_8gpu"], "--model 9b: give one of 7b"),
        ([*SEVEN, "parallel.tensor=3"], "parallel.tensor = 3"),
        ([*SEVEN, "--median", "10", "--p99", "5"], "--median 10 --p99 5: give 0 < median <= p99"),
    ],
)
def test_what_cannot_be_planned_is_one_message(capsys, monkeypatch, words, says) -> None:
    status, found, error = page(capsys, monkeypatch, "--nodes", "1", *words)
    assert status == 2 and not found
    assert says in error
