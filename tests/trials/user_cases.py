"""What users did in the third round of trials, and what only a launch shows of it: streams that
close, limits of the shell, networks that are not there, verifiers that fail, damaged checkpoints,
servers that are killed. What is refused before a launch is a row of tests/refusals."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials.fault_cases import begun, in_a_step
from tests.trials.looks import looked_at
from tests.trials.machine_cases import shell
from tests.trials.material import small, toy
from tests.trials.place import Case, Place, torchrun
from tests.trials.verdicts import Dies, Ends, Expected, Outcome, Refused

PLUGIN = """
from megatron_rl.rewards import Task, register_verifier

@register_verifier("dead")
def dead(task: Task, answer: str) -> float:
    raise KeyError("x")

@register_verifier("words")
def words(task: Task, answer: str) -> str:
    return "yes"

def function(tasks, responses):
    raise KeyError("x")
"""


def piped(nproc: int) -> Callable[[Place], Outcome]:
    """``| head -1``: the run continues without that output, and says so where it still can."""

    def play(place: Place) -> Outcome:
        words = toy(place.material, place.folder / "run", *(() if nproc > 1 else ALONE))
        command = shlex.join(map(str, words))
        start = f"-m torch.distributed.run --standalone --nproc-per-node {nproc} -m"
        text = f"set -o pipefail; '{sys.executable}' {start} megatron_rl.train {command} | head -1"
        return looked_at(place.command(["bash", "-c", text]), place.folder / "run")

    return play


ALONE = ("parallel=single", "rollout.tensor=1")


def trained(*more: str, plugin: bool = False) -> Callable[[Place], Outcome]:
    """A step of a model that reads any text, on one process."""

    def play(place: Place) -> Outcome:
        words = small(place.material.model("llama"), place.material.rows(), place.folder / "run")
        if plugin:
            words += ["--plugin", str(written_plugin(place))]
        words += [word.replace("{folder}", str(place.folder)) for word in more]
        return looked_at(place.train(words), place.folder / "run")

    return play


def written_plugin(place: Place) -> Path:
    path = place.folder / "mine.py"
    path.write_text(PLUGIN)
    return path


def evaluated_dead(place: Place) -> Outcome:
    """An evaluation whose verifier fails on every response."""
    words = small(place.material.model("llama"), place.material.rows(), place.folder / "run")
    more = [
        "--plugin",
        written_plugin(place),
        "reward.verifier=dead",
        "--out",
        place.folder / "out",
    ]
    return place.command([sys.executable, "-m", "megatron_rl.evaluate", *words, *more])


def own_mount(options: str) -> Callable[[Place], Outcome]:
    """One step of the toy with another /dev/shm."""

    def play(place: Place) -> Outcome:
        script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
        words = torchrun(2, toy(place.material, place.folder / "run"))
        return place.command(["unshare", "-m", "bash", "-c", script, "bash", *words])

    return play


def without_inodes(place: Place) -> Outcome:
    disk = place.folder / "disk"
    with place.mounted(disk, 64):
        os.system(f"mount -o remount,nr_inodes=5 {disk}")
        return place.torchrun(toy(place.material, disk / "run"))


def suspended(place: Place) -> Outcome:
    """Ctrl-Z for 25 s, then fg."""
    run_dir = place.folder / "run"
    running = begun(place, "trainer.num_steps=40")
    in_a_step(running, run_dir)
    os.killpg(running.process.pid, signal.SIGSTOP)
    time.sleep(25)
    os.killpg(running.process.pid, signal.SIGCONT)
    return looked_at(running.finish(90), run_dir, 40)


def hung_up(place: Place) -> Outcome:
    """The terminal closes: SIGHUP reaches torchrun and the ranks."""
    run_dir = place.folder / "run"
    running = begun(place)
    in_a_step(running, run_dir, 7)
    os.killpg(running.process.pid, signal.SIGHUP)
    return running.finish(30)


def with_environment(**variables: str) -> Callable[[Place], Outcome]:
    def play(place: Place) -> Outcome:
        words = toy(place.material, place.folder / "run")
        return place.torchrun(words, env=variables)

    return play


def without_network(place: Place) -> Outcome:
    words = toy(
        place.material, place.folder / "run", "logging.trackers=[wandb]", "logging.online=true"
    )
    server = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    return place.torchrun(words, env=server)


def odd_rank(place: Place) -> Outcome:
    words = toy(place.material, place.folder / "run", *ALONE)
    command = [sys.executable, "-m", "megatron_rl.train", *words]
    return place.command(command, env={"RANK": "a", "WORLD_SIZE": "1"})


def damaged(reader: str) -> Callable[[Place], Outcome]:
    """A byte of a training checkpoint flips, and ``sample`` or ``to-hf`` reads it."""

    def play(place: Place) -> Outcome:
        run_dir = place.folder / "run"
        model = place.material.model("llama")
        words = small(model, place.material.rows(), run_dir, "checkpoint.every_steps=1")
        first = place.train([*words, "checkpoint.export_at_end=false"])
        if first.code != 0:
            return first.noting(["the run before it failed"])
        checkpoint = run_dir / "checkpoints" / "step_000001"
        largest = max(checkpoint.rglob("*"), key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0x7F
        largest.write_bytes(content)
        if reader == "sample":
            return place.command([sys.executable, "-m", "megatron_rl.sample", run_dir])
        command = [sys.executable, "-m", "tools.convert_checkpoint", "to-hf", checkpoint]
        return place.command([*command, place.folder / "hf", "--config", model])

    return play


def served_words(place: Place, *more: object) -> list[object]:
    words = small(place.material.model("llama"), place.material.rows(), place.folder / "run")
    return [sys.executable, "-m", "megatron_rl.serve", *words, "source=servers", *more]


def served(*more: str) -> Callable[[Place], Outcome]:
    return lambda place: place.command(served_words(place, *more))


def server_killed(place: Place) -> Outcome:
    """SIGKILL of megatron_rl.serve: its engine ends with it (``left`` would say so)."""
    running = place.start(served_words(place))
    running.wait_for(lambda: "waits for a trainer" in running.text())
    running.process.kill()
    return running.finish(20)


def swept(place: Place) -> Outcome:
    """--nproc against the layout of the runs."""
    words = toy(place.material, place.folder / "run", "seed=1,2", "parallel.tensor=2")
    words = [word for word in words if not word.startswith("run_dir=")]
    command = [sys.executable, "-m", "megatron_rl.sweep", "--out", place.folder / "out"]
    return place.command([*command, "--nproc", "3", *words])


def rows_with_holes(place: Place) -> Outcome:
    """Rows before the checkpoint are gone, and the run is made longer."""
    run_dir = place.folder / "run"
    model, data = place.material.model("llama"), place.material.rows()
    words = small(model, data, run_dir, "checkpoint.every_steps=1", "trainer.num_steps=3")
    first = place.train(words)
    if first.code != 0:
        return first.noting(["the run before it failed"])
    file = run_dir / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines(True) if '"step": 2,' not in line]
    file.write_text("".join(kept))
    return place.train([*words, "trainer.num_steps=4"])


def user(
    name: str,
    title: str,
    play: Callable[[Place], Outcome],
    *expected: Expected,
    limit_s: float = 120,
    needs: Sequence[str] = (),
) -> Case:
    return Case(name, "users", title, play, expected, "command", limit_s, needs=tuple(needs))


def of_rewards() -> list[Case]:
    dead = trained("reward.verifier=dead", plugin=True)
    words = trained("reward.verifier=words", plugin=True)
    function = ("reward.verifier=auto", "reward.function='{folder}/mine.py:function'")
    raises = refused_late("max_excluded_share", "KeyError")
    no_number = refused_late("max_excluded_share", "yes")
    bf16 = ("precision=bf16", "rollout.dtype=bfloat16", "mismatch_limits.abort_above=1e-4")
    far = refused_late("mismatch_limits.abort_above")
    return [
        user("u_dead", "a verifier that always fails", dead, raises),
        user("u_words", "one that returns a text", words, no_number),
        user("u_function", "a dead function", trained(*function, plugin=True), raises),
        user("u_dead_eval", "an evaluation with a dead verifier", evaluated_dead, raises),
        user("u_bf16", "bfloat16 with limits of float32", trained(*bf16), far),
    ]


def of_machine() -> list[Case]:
    root = ("root",)
    gone = Ends(("reader of stdout is gone",))
    shared = (refused_late("/dev/shm"), Dies(("/dev/shm",)))
    no_interface = with_environment(GLOO_SOCKET_IFNAME="nope0")
    named = Refused(("GLOO_SOCKET_IFNAME", "nope0"))
    hung = Dies(("since step",), codes=(1, -1, 129))
    too_large = refused_late("ulimit -f")
    offline = refused_late("logging.trackers: wandb", "logging.online=false")
    nothing_left = refused_late("0 files are free")
    return [
        user("u_pipe", "| head -1", piped(1), gone),
        user("u_pipe2", "the same with two ranks", piped(2), gone),
        user("u_closed", "stdout is closed", shell("exec >&-;"), Ends()),
        user("u_shm_ro", "a read-only /dev/shm", own_mount("ro"), *shared, needs=root),
        user("u_shm_small", "/dev/shm of 64 KiB", own_mount("size=64k"), *shared, needs=root),
        user("u_inodes", "no inodes left", without_inodes, nothing_left, needs=root),
        user("u_fsize", "ulimit -f of 100 KiB", shell("ulimit -f 100;"), too_large),
        user("u_gloo", "an interface that is not there", no_interface, named),
        user("u_rank", "RANK=a", odd_rank, Refused(("RANK",))),
        user("u_wandb", "wandb without a network", without_network, offline),
        user("u_ctrl_z", "Ctrl-Z for 25 s", suspended, Ends()),
        user("u_hangup", "SIGHUP of all", hung_up, hung),
    ]


def of_files() -> list[Case]:
    whole = Refused(("step_000001", "digest"), before="engine")
    holes = Ends(("metrics.jsonl", "step 2"))
    sample = damaged("sample")
    return [
        user("u_damaged_sample", "sample of a damaged checkpoint", sample, whole),
        user("u_damaged_hf", "to-hf of a damaged checkpoint", damaged("to-hf"), whole),
        user("u_holes", "rows before the checkpoint are gone", rows_with_holes, holes),
    ]


def of_servers() -> list[Case]:
    """And of a sweep."""
    host = ("--host", "no.such.host")
    model = Refused(("model.path", "/nowhere"))
    late = Refused(("parallel", "3"), within_s=60)
    return [
        user("u_port", "serve --port 99999", served("--port", "99999"), Refused(("--port",))),
        user("u_lease", "serve --lease-s -1", served("--lease-s=-1"), Refused(("lease",))),
        user("u_host", "serve on no address", served(*host), Refused(host)),
        user("u_served", "serve of no model", served("model.path=/nowhere"), model),
        user("u_own", "serve of a colocated run", served("source=colocated"), Refused(("source",))),
        user("u_serve_kill", "SIGKILL of serve", server_killed, Dies(codes=(-9,))),
        user("u_sweep", "sweep --nproc against the layout", swept, late),
    ]


def refused_late(*says: str) -> Refused:
    """In the first step: nothing is lost."""
    return Refused(says, before="", within_s=120)


def cases() -> list[Case]:
    return [*of_rewards(), *of_machine(), *of_files(), *of_servers()]
