"""Limits hold whatever a response is: time, memory, the sum over a batch, lost processes, nothing
left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl import plugins
from megatron_rl.rewards import registry
from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.workers import server
from tests.launch import REPO
from tests.unit.rewards.cases import accuracies, config, prompt, restarts

PLUGIN = '''
import os
import sys
import time
from megatron_rl.rewards import Task, register_verifier

@register_verifier("mean")
def mean(task: Task, answer: str) -> float:
    """Does to its worker what the answer says."""
    if answer == "hang":
        sum(range(10**15))  # one instruction: no timer of Python rings
    if answer == "loop":  # for as long as it can
        while True:
            try:
                time.sleep(0.001)
            except BaseException:
                pass  # the bell is caught
    if answer == "die":
        os._exit(3)
    if answer == "kill the server":
        os.kill(os.getppid(), 9)
        time.sleep(1)
    if answer == "memory":
        bytearray(64 << 30)
    if answer == "raise":
        raise RuntimeError("no\\nsecond line")
    if answer == "print":
        print("{}\\n" * 1000)
    if answer == "child":
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "987")
        time.sleep(1000)
    if answer == "draw":
        import random
        return float(random.random() == 0.8444218515250481)
    if answer == "outside":
        return 7.0
    if answer.startswith("/"):  # a folder that is not there: the next try finds it
        os.path.exists(answer) or os.mkdir(answer) or 1 / 0
    return 1.0
'''


@pytest.fixture
def mean(tmp_path, monkeypatch):
    """Makes rewards with that verifier; closes them."""
    path = tmp_path / "mean_verifier.py"
    path.write_text(PLUGIN)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    plugins.load_plugins([str(path)])
    made = []

    def make(**changes):
        made.append(build_reward(config(verifier="mean", **changes)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def judge(reward, *responses):
    """(accuracies, the response that could not be judged -> reason kinds counted)."""
    return accuracies(reward, [prompt()] * len(responses), list(responses))


def test_what_a_verifier_does_to_its_worker_costs_its_own_response_alone(mean):
    reward = mean(timeout_s=0.5)
    bad = ("hang", "loop", "die", "kill the server", "memory", "raise", "outside")
    responses = [text for one in bad for text in ("good", one)] + ["print", "draw", "draw", "good"]
    found = judge(reward, *responses)
    assert found == [1, 0] * len(bad) + [1, 1, 1, 1]
    assert sum(reward.problems.values()) == len(bad)
    kinds = " ".join(reward.problems)
    for words in (
        "its worker had to be killed",
        "process that judged it died",
        "MemoryError",
        "RuntimeError",
        "score 7.0 is not",
    ):
        assert words in kinds
    assert restarts(reward) >= 4


def test_a_verifier_that_fails_is_asked_again_where_there_is_no_stdout(mean, tmp_path):
    """A worker of a run that was started with ``>&-``: what it prints leads nowhere."""
    os.set_inheritable(1, False)
    try:
        reward = mean(num_tries=2)
        assert judge(reward, "print", str(tmp_path / "a"), "raise", "good") == [1, 1, 0, 1]
    finally:
        os.set_inheritable(1, True)
    assert sum(reward.problems.values()) == 1 and restarts(reward) == 0


def test_a_batch_of_hanging_responses_ends_with_the_budget_of_the_step(mean):
    """64 responses that hang, 2 workers, 1 + 1 s each: 64 s without a budget."""
    reward = mean(timeout_s=1.0, step_timeout_s=3.0, num_workers=2)
    assert judge(reward, "good") == [1]
    began = time.monotonic()
    assert judge(reward, *["hang"] * 64) == [0] * 64
    assert time.monotonic() - began < 30
    assert sum(reward.problems.values()) == 64
    assert "step_timeout_s = 3 s" in " ".join(reward.problems)
    assert judge(reward, *["good"] * 8) == [1] * 8


def test_a_process_that_a_verifier_started_dies_with_its_worker(mean):
    reward = mean(timeout_s=0.5)
    assert judge(reward, "child", "good") == [0, 1]
    assert judge(reward, "good") == [1]
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "987"]
    ]


def test_texts_that_are_no_text_reach_the_verifier_as_they_are(mean, tmp_path):
    reward = build_reward(config(answer_pattern="(.+)"))
    texts = ["\x00", "\ud800", "\udfff\ud800", "\u2028", "\U0001f600", "a\nb", '"', "\\"]
    assert accuracies(reward, [prompt(text) for text in texts[4:]], texts[4:]) == [1] * 4
    reward.close()
    long = mean()
    assert judge(long, "x" * 1_000_001, "x" * 1_000_000, *texts) == [0, 1] + [1] * 8
    assert "too long to judge" in " ".join(long.problems)


def test_a_server_killed_while_starting_is_started_again_and_counted(mean, caplog, monkeypatch):
    monkeypatch.setattr(server, "START_DELAYS_S", (0.0,) * len(server.START_DELAYS_S))
    reward = mean()
    reward.check([prompt()])
    for _ in server.START_DELAYS_S:
        reward._pool._server._process.kill()
        reward._pool._server._process.wait()
        reward._pool._replace(0)
    assert judge(reward, "good", "good") == [1, 1]
    assert caplog.text.count("is started again") == len(server.START_DELAYS_S)


def test_workers_that_can_never_start_end_the_run_with_the_reason(mean, monkeypatch, tmp_path):
    reward = mean()
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(server, "START_DELAYS_S", (0.0, 0.01))
    with pytest.raises(RuntimeError, match=r"ended 3 times while starting \(exit code 9"):
        judge(reward, "good")


def test_a_plug_in_that_only_the_trainer_can_import_is_an_error_of_the_user(mean, tmp_path):
    reward = mean()
    (tmp_path / "mean_verifier.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(
        ValueError, match=r"mean_verifier.py: cannot be imported .*nothing_of_this_name"
    ):
        judge(reward, "good")


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path):
    """A worker in the middle of a response that no timer can stop: it has no end of its own."""
    (tmp_path / "mean_verifier.py").write_text(PLUGIN)
    program = f"""
import threading, time
from megatron_rl import plugins
from megatron_rl.rewards.build import build_reward
from tests.unit.rewards.cases import config, prompt
plugins.load_plugins([{str(tmp_path / "mean_verifier.py")!r}])
reward = build_reward(config(verifier="mean", timeout_s=100.0))
reward.score([prompt()], ["good"], [False])
print("ready", flush=True)
reward.score([prompt()], ["hang"], [False])
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, cwd=REPO
    ) as trainer:
        assert trainer.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        family = psutil.Process(trainer.pid).children(recursive=True)
        assert len(family) == 2  # the server and its worker
        trainer.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_the_workers_import_no_torch(tmp_path):
    """It would cost seconds at each start and most of a memory limit."""
    program = (
        "import sys\n"
        "from megatron_rl.rewards.workers import function_worker, response_verifier, worker\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=60,
    )


def test_the_folder_of_the_package_is_known_to_the_workers(mean, monkeypatch):
    monkeypatch.chdir(Path("/"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert judge(mean(), "good") == [1]
