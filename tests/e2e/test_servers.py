"""Training on vLLM servers: two of them, one step behind, is the plain program one step after the
other, bit for bit; so it is when a server is killed in the middle of a group, the trainer is killed
and goes on, and another server comes late."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.runtime.registry import FOLDER, SECRET, Lease, Registration
from tests.e2e.toy import overrides, rows, write_data
from tests.launch import REPO, end, launch, torchrun
from tests.numerics.server import with_entry_point

pytestmark = pytest.mark.full
STEPS = 10
PROGRAM = Path(__file__).parent / "delayed_program.py"
REPLAY = "tools/replay_step.py"
CLIENT = Path(__file__).parent / "client_program.py"
LIMIT_S = 600
OF_THE_SOURCE = ("time/", "throughput/", "memory/", "source/", "sync/", "tokens/discarded")
ASYNCHRONOUS = (
    "rollout.tensor=1",
    "rollout.max_response_tokens=8",
    "batch.responses_per_prompt=4",
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
    "weight_sync.logprob_check_tolerance=1e-4",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    f"trainer.num_steps={STEPS}",
)
ASK_AGAIN = (
    "batch.prompts_per_step=4",
    "batch.prompts_per_minibatch=2",
    "rollout_hooks.vcrl.kappa=0.2",
    "rollout_hooks.dars.schedule=hw",
    "rollout_hooks.dars.max_responses=8",
)
WARMER = (
    "batch.responses_per_prompt=2",  # so that a group is entirely right now and then
    "optim.learning_rate=1e-2",
    "rollout_hooks.erpo.increase=0.2",
)
# Hooks of a run, and the metrics by which one sees that they have done something.
HOOKS = [
    pytest.param(ASK_AGAIN, ("vcrl/replayed_groups", "dars/hard_groups"), id="asked again"),
    pytest.param(WARMER, ("erpo/hot_groups",), id="warmer"),
]
FILTERED = "method.filters.dynamic_sampling.max_tries=8"
IN_PARTS = "source.partial.groups_in_flight=14"
ANNEALED = ["rollout.anneal.start=1.6", "rollout.anneal.decay_tokens=8"]
ANNEALED += ["rollout.anneal.plain_tokens=1", "rollout.anneal.policy=annealed"]
TRUNCATED = ("rollout.top_k=8", "rollout.top_p=0.9")
PAIRS = {
    "dynamic_sampling_partial": (IN_PARTS, FILTERED),
    "hooks_partial": (IN_PARTS, "rollout_hooks.dars.schedule=hw", "rollout_hooks.vcrl.kappa=0.2"),
    "hooks_dynamic_sampling": (FILTERED, "rollout_hooks.erpo.increase=0.2"),
    "demonstrations_partial": (IN_PARTS, "method=rl_plus"),
    "demonstrations_hooks": ("method=rl_plus", "rollout_hooks.vcrl.kappa=0.2"),
    "remembered": ("method=ar3po", "rollout_hooks.ar3po.stages=2", "batch.responses_per_prompt=2"),
    "annealing": ANNEALED,
    "truncation": TRUNCATED,
}
ON_SERVERS = (*ASYNCHRONOUS, "source=servers", "source.staleness=1")


@dataclass
class Served:
    """A server of ``megatron_rl.serve`` in its own run folder."""

    process: subprocess.Popen
    folder: Path
    log: Path

    def registration(self) -> Registration:
        deadline = time.monotonic() + LIMIT_S
        while not (files := list((self.folder / FOLDER).glob("*.json"))):
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        return Registration(**json.loads(files[0].read_text()))

    def tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def send(self, number: int) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[list[Served]]:
    """Three, which start at the same time; one secret for all."""
    environment = {
        **os.environ,
        **with_entry_point(folder),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    started: list[Served] = []
    try:
        for number in range(3):
            home = folder / f"server{number}"
            (home / FOLDER).mkdir(parents=True)
            if number:
                shutil.copy(folder / "server0" / FOLDER / SECRET, home / FOLDER)
            else:
                (home / FOLDER / SECRET).touch(mode=0o600)
                (home / FOLDER / SECRET).write_text("known to these servers\n")
            command = [sys.executable, "-m", "megatron_rl.serve", "--lease-s", "60"]
            # No other tests sample so.
            sampled = (*ANNEALED, *TRUNCATED, "rollout.stop=[h]")
            command += overrides(folder, home, *ON_SERVERS, *sampled)
            log = folder / f"server{number}.log"
            with log.open("w") as output:
                to_log = {"stdout": output, "stderr": output}
                process = subprocess.Popen(command, **to_log, cwd=REPO, env=environment)
            started.append(Served(process, home, log))
        yield started
    finally:
        for served in started:
            end(served.process)


@contextlib.contextmanager
def registering(servers: list[Served]) -> Iterator[Callable[[int, Path], Lease]]:
    """Lets a server take part in the run of a folder, as if it had been started for it."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def renew(lease: Lease) -> None:
        while lease.is_held and not stop.wait(2.0):
            lease.renew()

    def register(number: int, run_dir: Path) -> Lease:
        registration = servers[number].registration()
        home = run_dir / FOLDER
        home.mkdir(parents=True, exist_ok=True)
        if not (home / SECRET).exists():
            shutil.copy(servers[number].folder / FOLDER / SECRET, home)
        lease = Lease(home, replace(registration, beat=0, lease_s=60.0))
        threads.append(threading.Thread(target=renew, args=(lease,)))
        threads[-1].start()
        return lease

    try:
        yield register
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def register(servers) -> Iterator[Callable[[int, Path], Lease]]:
    with registering(servers) as register:
        yield register


@dataclass(frozen=True)
class Trained:
    """What each step was, and the weights in the end."""

    steps: list[dict]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sequential(folder) -> Trained:
    out = folder / "sequential"
    launch(PROGRAM, 2, [1, out, *overrides(folder, folder / "unused", *ASYNCHRONOUS)], LIMIT_S)
    weights = torch.load(out / "weights.pt", weights_only=True)
    return Trained(json.loads((out / "steps.json").read_text()), weights)


def must_be_equal(run_dir: Path, expected: Trained) -> None:
    """Every number of every step, and every bit of the weights."""
    found = rows(run_dir)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, wanted in zip(found, expected.steps, strict=True):
        assert {key: row.get(key) for key in wanted} == wanted
    weights: dict[str, torch.Tensor] = {}
    for file in (run_dir / "export").glob("*.safetensors"):
        weights |= load_file(file)
    assert weights.keys() == expected.weights.keys()
    different = [name for name in weights if not weights[name].equal(expected.weights[name])]
    assert not different


def test_two_servers_one_step_behind_are_the_delayed_program(folder, register, sequential):
    run_dir = folder / "lockstep"
    register(0, run_dir)
    register(1, run_dir)
    steps_of(run_dir)
    must_be_equal(run_dir, sequential)
    found = rows(run_dir)
    assert [row["source/servers"] for row in found] == [2.0] * STEPS
    assert [row["source/staleness_max"] for row in found] == [0.0] + [1.0] * (STEPS - 1)


def test_server_and_trainer_are_killed_and_nothing_is_lost(folder, servers, register, sequential):
    run_dir = folder / "trouble"
    checkpoint = run_dir / "checkpoints" / "step_000002" / "manifest.json"
    register(0, run_dir)
    lease = register(1, run_dir)
    with training(folder, run_dir) as (process, log):
        until(checkpoint.exists, process, log)
        servers[1].send(signal.SIGSTOP)  # it has taken requests, and answers none of them
        time.sleep(3.0)
        servers[1].send(signal.SIGKILL)
        until(lambda: "marked dead" in log.read_text(), process, log)
        assert not lease.is_held
        kill(process)
    finished = len(rows(run_dir))
    assert 2 <= finished < STEPS, "it was killed in the middle"
    with training(folder, run_dir) as (process, log):
        until(lambda: len(rows(run_dir)) > finished, process, log)
        register(2, run_dir)
        until(lambda: process.poll() is not None, process, log, may_end=True)
        assert process.returncode == 0, log.read_text()[-3000:]
    assert re.search(r"server .* joined at weights version", log.read_text())
    must_be_equal(run_dir, sequential)


def test_a_server_answers_its_run_as_the_engine_in_the_process_and_nobody_else(folder, servers):
    registration = servers[0].registration()
    secret = (servers[0].folder / FOLDER / SECRET).read_text().strip()
    words = overrides(folder, folder / "unused", *ON_SERVERS, "parallel=single")
    output = launch(CLIENT, 1, [registration.url, secret, *words], timeout=LIMIT_S).stdout
    assert "all cases hold" in output


def steps_of(run_dir: Path, *more: str) -> list[dict]:
    """Trains; what each step was, without what one source says of itself."""
    words = overrides(run_dir.parent, run_dir, *ON_SERVERS, *more)
    launch("megatron_rl.train", 2, words, timeout=LIMIT_S)
    return [
        {key: value for key, value in row.items() if not key.startswith(OF_THE_SOURCE)}
        for row in rows(run_dir)
    ]


def test_a_server_that_takes_turns_with_the_trainer_is_the_colocated_engine(folder, register):
    register(0, folder / "turns_servers")
    more = ["source.staleness=0", "trainer.num_steps=3"]
    steps = steps_of(folder / "turns_servers", *more)
    assert steps == steps_of(folder / "turns_colocated", "source=colocated", *more)
    assert len(steps) == 3


@pytest.mark.parametrize(("hooks", "done"), HOOKS)
def test_sampling_hooks_are_those_of_the_colocated_engine(folder, register, hooks, done):
    name = f"hooks_{len(hooks)}"
    register(0, folder / f"{name}_servers")
    more = [*hooks, "source.staleness=0", "trainer.num_steps=8"]
    steps = steps_of(folder / f"{name}_servers", *more)
    assert steps == steps_of(folder / f"{name}_colocated", "source=colocated", *more)
    assert all(sum(row[f"hook/{key}"] for row in steps) > 0 for key in done)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_features_are_those_of_the_colocated_engine(folder, register, name):
    register(0, folder / f"{name}_servers")
    write_data(folder / "given.jsonl", given=True)
    more = [*PAIRS[name], "source.staleness=0", "trainer.num_steps=4"]
    if "method=rl_plus" in more:
        more.append(f"data.train={folder / 'given.jsonl'}")
    steps = steps_of(folder / f"{name}_servers", *more)
    assert steps == steps_of(folder / f"{name}_colocated", "source=colocated", *more)


@pytest.mark.parametrize(("hooks", "done"), HOOKS)
def test_sampling_hooks_one_step_behind_are_the_same_whoever_serves(folder, register, hooks, done):
    """A prompt's temperature, and what is asked again, follow from verdicts of steps before."""
    register(0, alone := folder / f"hooks_{len(hooks)}_alone")
    steps = steps_of(alone, *hooks, "trainer.num_steps=8")
    assert all(sum(row[f"hook/{key}"] for row in steps) > 0 for key in done)
    if "rollout_hooks.dars.schedule=hw" in hooks:  # what is asked again is of the newest weights
        stale = [row["source/staleness_mean"] for row in rows(alone)]
        assert stale[0] == 0.0 < sum(stale) and max(stale) < 1.0
    both = folder / f"hooks_{len(hooks)}_both"
    register(0, both)
    register(1, both)
    steps_of(both, *hooks, "trainer.num_steps=5")  # and a restart in between
    assert steps_of(both, *hooks, "trainer.num_steps=8") == steps


@pytest.fixture(scope="module")
def free(folder, servers) -> Iterator[Path]:
    """The folder of a run with checkpoints of steps 2, 4 and 5."""
    run_dir = folder / "free"
    more = [
        "source.schedule=free",
        "source.staleness=2",
        "trainer.num_steps=5",
        "batch.prompts_per_minibatch=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep=3",
    ]
    with registering(servers) as register:
        register(0, run_dir)
        register(1, run_dir)
        steps_of(run_dir, *more)
    yield run_dir


def test_free_servers_take_new_weights_at_once_and_ages_stay_within_the_bound(free):
    found = rows(free)
    assert [row["rollout/num_responses"] for row in found] == [32] * 5
    ages = [row["source/staleness_max"] for row in found]
    assert max(ages) <= 2 and ages[0] == 0, "nothing is older than the first weights"
    assert all(row["mismatch/logprob_abs_diff_max"] < 20 for row in found)


def replayed(run_dir: Path, *options: object, processes: int = 2, code: int = 0) -> str:
    done = launch(REPLAY, processes, [run_dir, *options], LIMIT_S, check=False)
    assert (done.returncode != 0) == (code != 0), done.stdout[-3000:]
    return done.stdout


def test_every_step_of_a_free_run_is_computed_again_bit_for_bit(free):
    """From the model of the start through all steps and checkpoints, and from the one before."""
    said = replayed(free, "--step", 5, "--after", 0)
    assert re.findall(r"(?m)^step (\d): 32 responses to 8 prompts", said) == list("12345")
    assert len(re.findall(r"\d+ metrics: all equal to those of the run", said)) == 5
    assert said.count("weights and those of the checkpoint: all equal") == 3
    said = replayed(free, "--step", 3, "--bundle")
    assert "checkpoints/step_000002, 1 steps" in said and said.count("all equal to those") == 1
    assert (free / "nonfinite" / "step_000003" / "bundle.json").exists()


def test_a_record_that_is_not_the_runs_is_told(free, tmp_path):
    run_dir = tmp_path / "changed"
    shutil.copytree(free, run_dir)
    path = run_dir / "record" / "step_000003.safetensors"
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    facts["scores"][0]["reward"] += 0.5
    save_file(load_file(path), path, {"facts": json.dumps(facts)})
    said = replayed(run_dir, "--step", 4, code=1)
    assert re.search(r"step 3: .*\n  \d+ of \d+ metrics are not those of the run", said)
    assert "loss/total" in said and "not the steps of the run" in said
    assert re.search(r"checkpoint: \d+ tensors differ", said)
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    said = replayed(run_dir, "--step", 5, "--after", 4, code=1)
    assert "--after 4" in said and "it has 0, 2, 5" in said


def kill(process: subprocess.Popen) -> None:
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@contextlib.contextmanager
def training(folder: Path, run_dir: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    command = torchrun("megatron_rl.train", 2)
    command += overrides(folder, run_dir, *ON_SERVERS, "checkpoint.every_steps=2")
    log = folder / f"{run_dir.name}.log"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=REPO, env=environment
        )
    try:
        yield process, log
    finally:
        end(process)


def until(
    holds: Callable[[], bool], process: subprocess.Popen, log: Path, *, may_end: bool = False
) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert may_end or process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
