"""Commands beside training: conversions, plans, configuration, weights for a server."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.launch import REPO, end
from tests.numerics.server import shared_memory
from tests.trials import looks
from tests.trials.fault_cases import filled
from tests.trials.material import small, toy_alone, write_model
from tests.trials.place import Case, Place, end_all, marked_processes
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

CONVERT = REPO / "tools" / "convert_checkpoint.py"
MEMORY = REPO / "tools" / "plan_memory.py"
SYNC = REPO / "tools" / "plan_sync.py"
CODES = (1, 2)


def tool(
    name: str, title: str, words: Callable[[Place], Sequence[object]], *expected: Expected, limit_s: float = 90, needs: tuple[str, ...] = ()
) -> Case:
    """A command of Python; ``words`` follow the interpreter."""

    def play(place: Place) -> Outcome:
        return place.command([sys.executable, *words(place)])

    return Case(name, "journeys", title, play, expected, "command", limit_s, needs=needs)


def refused(*says: str) -> Refused:
    return Refused(says, before="", codes=CODES)


def round_trip(kind: str, family: str) -> Callable[[Place], Outcome]:
    """HF to ``kind`` and back: the weights are equal, bit for bit."""

    def play(place: Place) -> Outcome:
        source = place.material.model(family)
        middle, target = place.folder / "middle", place.folder / "hf"
        first = place.command([sys.executable, CONVERT, f"to-{kind}", source, middle])
        if first.code != 0:
            return first
        second = place.command([sys.executable, CONVERT, "to-hf", middle, target])
        return second.noting(looks.same_weights(source, target) if second.code == 0 else [])

    return play


def trip(kind: str, family: str) -> Case:
    return Case(f"jrn_{kind}_{family}", "journeys", f"{family} to {kind} and back", round_trip(kind, family), (Ends(),), "command", 150)


def of_training(place: Place) -> Outcome:
    """A training checkpoint becomes a HF directory equal to the export."""
    from tests.trials.journey_cases import finished_run

    run_dir = finished_run(place)
    target = place.folder / "hf"
    words = [sys.executable, CONVERT, "to-hf", run_dir / "checkpoints" / "step_000002", target]
    outcome = place.command([*words, "--config", place.material.model("toy")])
    return outcome.noting(looks.same_weights(run_dir / "export", target) if outcome.code == 0 else [])


def checkpoint(place: Place) -> Path:
    from tests.trials.journey_cases import finished_run

    return finished_run(place) / "checkpoints" / "step_000002"


def cut_source(place: Place) -> list[object]:
    model = place.material.copy_of("llama", place.folder / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    return [CONVERT, "to-megatron", model, place.folder / "out"]


def full_target(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 1) as disk:
        filled(place, disk)
        return place.command([sys.executable, CONVERT, "to-megatron", place.material.model("llama"), disk / "out"])


def existing_target(place: Place) -> list[object]:
    (place.folder / "out").mkdir()
    (place.folder / "out" / "mine.txt").write_text("x")
    return [CONVERT, "to-megatron", place.material.model("llama"), place.folder / "out"]


def conversions() -> list[Case]:
    out = lambda place: place.folder / "out"  # noqa: E731
    return [
        *(trip(kind, family) for kind in ("megatron", "nemo") for family in ("llama", "qwen2", "mixtral")),
        Case("jrn_hf_training", "journeys", "a training checkpoint to HF", of_training, (Ends(),), "command"),
        tool(
            "jrn_hf_no_config",
            "the same without --config",
            lambda place: [CONVERT, "to-hf", checkpoint(place), out(place)],
            refused("--config"),
        ),
        tool(
            "jrn_hf_wrong_folder",
            "to-hf of a run's folder",
            lambda place: [CONVERT, "to-hf", checkpoint(place).parents[1], out(place)],
            refused("checkpoint|step_"),
        ),
        tool(
            "jrn_hf_of_hf",
            "to-hf of a HF directory",
            lambda place: [CONVERT, "to-hf", place.material.model("llama"), out(place)],
            refused("llama|HF directory|checkpoint"),
        ),
        tool(
            "jrn_convert_nothing",
            "a source that does not exist",
            lambda place: [CONVERT, "to-megatron", "/nowhere", out(place)],
            refused("/nowhere"),
        ),
        tool("jrn_convert_cut", "a cut weight file", cut_source, refused(r"model\.safetensors")),
        tool("jrn_convert_exists", "a target that exists", existing_target, refused("out")),
        Case(
            "jrn_convert_full",
            "journeys",
            "a target without room",
            full_target,
            (refused("no space|room|full|out"),),
            "command",
            needs=("root",),
        ),
        tool(
            "jrn_convert_unwritable",
            "a target that cannot be made",
            lambda place: [CONVERT, "to-megatron", place.material.model("llama"), "/proc/out"],
            refused("/proc/out"),
        ),
    ]


def large(place: Place) -> Path:
    from tests.e2e.toy import write_large_config

    return place.material.made("large", write_large_config)


def plans() -> list[Case]:
    def memory(name: str, title: str, world: int, gpu: float, words: Callable[[Place], Sequence[str]], *expected: Expected) -> Case:
        return tool(name, title, lambda place: [MEMORY, "--world-size", world, "--gpu-gib", gpu, *words(place)], *expected)

    def sync(name: str, title: str, words: Sequence[str], *expected: Expected) -> Case:
        return tool(name, title, lambda place: [SYNC, *words], *expected)

    model = lambda place: f"model.path={large(place)}"  # noqa: E731
    layout = ["--train", "tp=8,pp=4,dp=2", "--rollout", "tp=8,dp=8"]
    return [
        memory(
            "jrn_memory_fits",
            "72B on 64 large GPUs",
            64,
            141,
            lambda place: [model(place), "parallel=tp8", "parallel.pipeline=4", "rollout.tensor=8"],
            Ends(("GiB",)),
        ),
        memory(
            "jrn_memory_large",
            "72B on 8 GPUs",
            8,
            80,
            lambda place: [model(place), "parallel=tp8", "rollout.tensor=8"],
            Ends(("does not fit", "optimizer"), codes=(1,)),
        ),
        memory("jrn_memory_none", "no model", 8, 80, lambda place: [], refused(r"model\.path")),
        memory("jrn_memory_seven", "7 processes", 7, 80, lambda place: [model(place), "parallel=tp8"], refused("7")),
        memory("jrn_memory_zero", "no GPU", 0, 80, lambda place: [model(place)], refused("world-size")),
        sync("jrn_sync_72b", "72B", ["--model", "72b", *layout], Ends()),
        sync("jrn_sync_json", "as JSON", ["--model", "72b", *layout, "--json"], Ends((r"\{",))),
        sync(
            "jrn_sync_moe",
            "a mixture of experts",
            ["--model", "qwen3-235b-a22b", "--train", "tp=4,pp=2,dp=4,ep=8", "--rollout", "tp=8,dp=4"],
            Ends(),
            refused("layers|94"),
        ),
        sync("jrn_sync_model", "a model nobody knows", ["--model", "nope", *layout], refused("nope")),
        sync(
            "jrn_sync_layout",
            "a layout that does not divide",
            ["--model", "72b", "--train", "tp=7,pp=4,dp=2", "--rollout", "tp=8,dp=7"],
            refused("tp|7"),
        ),
        sync(
            "jrn_sync_word", "a word that is no layout", ["--model", "72b", "--train", "tensor=8", "--rollout", "tp=8"], refused("tensor")
        ),
        sync(
            "jrn_sync_ranks",
            "sides of different sizes",
            ["--model", "72b", "--train", "tp=8,pp=1,dp=1", "--rollout", "tp=8,dp=2"],
            refused("8|16"),
        ),
    ]


def configuration() -> list[Case]:
    train = ("-m", "megatron_rl.train")
    return [
        tool(
            "jrn_cfg",
            "--cfg job",
            lambda place: [*train, "--cfg", "job", *toy_alone(place.material, place.folder / "run")],
            Ends(("learning_rate",)),
        ),
        tool(
            "jrn_cfg_typo",
            "--cfg job with an unknown key",
            lambda place: [*train, "--cfg", "job", "optim.lr=3"],
            refused(r"optim\.lr", "learning_rate"),
        ),
        tool("jrn_cfg_bare", "--cfg job without anything", lambda place: [*train, "--cfg", "job"], Ends(("num_steps",))),
        tool("jrn_help", "--help of the trainer", lambda place: [*train, "--help"], Ends(("method", "--cfg"), within_s=15)),
        tool("jrn_help_sweep", "--help of the sweep", lambda place: ["-m", "megatron_rl.sweep", "--help"], Ends(("--out",), within_s=15)),
        tool("jrn_help_sample", "--help of sample", lambda place: ["-m", "megatron_rl.sample", "--help"], Ends(("SOURCE",), within_s=15)),
        tool(
            "jrn_sweep_typo",
            "a sweep with a typo",
            lambda place: ["-m", "megatron_rl.sweep", "--out", place.folder / "runs", "--nproc", "2", "method=gpro,dapo"],
            refused("gpro", "grpo"),
        ),
        tool(
            "jrn_sweep_twice",
            "a sweep with the same run twice",
            lambda place: [
                "-m",
                "megatron_rl.sweep",
                "--out",
                place.folder / "runs",
                "--nproc",
                "2",
                "model.path=m",
                "data.train=a.jsonl",
                "data.eval=a.jsonl",
                "seed=1,1,2",
            ],
            refused("twice|seed=1"),
        ),
        tool("jrn_vision", "a vision model by its configuration", vision, Refused(("Qwen2_5_VL", "support"))),
    ]


def vision(place: Place) -> list[object]:
    model = place.material.copy_of("llama", place.folder / "model")
    (model / "config.json").write_text(
        '{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": {}}'
    )
    return ["-m", "megatron_rl.train", *small(model, place.material.rows(), place.folder / "run")]


def readme_server() -> tuple[list[str], dict[str, str]]:
    """The first command of examples/vllm_server/README.md: its words and its variables, as printed."""
    import shlex

    text = (REPO / "examples" / "vllm_server" / "README.md").read_text()
    block = text.split("```bash\n", 1)[1].split("```", 1)[0].replace("\\\n", " ")
    words = shlex.split(block.splitlines()[0])
    variables = {}
    while "=" in words[0]:
        key, _, value = words.pop(0).partition("=")
        variables[key] = value
    return words, variables


def served(place: Place) -> Outcome:
    """The two commands of the README: a server of one model, another one's weights pushed into it."""
    model = place.material.made("served", lambda path: write_model(path, "qwen2", seed=1))
    words, variables = readme_server()
    words = [sys.executable, *(str(model) if word == "MODEL" else word for word in words[1:])]
    port = free_port()
    running = place.start([*words, "--host", "127.0.0.1", "--port", str(port)], env=variables)
    address = f"http://127.0.0.1:{port}"
    try:
        running.wait_for(lambda: answers(f"{address}/health"), 150)
        pusher = Place(place.folder, place.material, place.server, 90)
        push = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        push += [str(REPO / "examples" / "vllm_server" / "push.py"), "--server", address]
        push += ["--model", str(place.material.model("qwen2")), "--tensor", "2", "--version", "1"]
        return pusher.start(push, log="push.txt").finish(90)
    except TimeoutError as error:
        return Outcome(1, running.text()[-3000:], time.monotonic() - running.started).noting([str(error)[:200]])
    finally:
        mapped = shared_memory(running.process.pid)
        end(running.process)
        end_all(lambda pid: pid in marked_processes(place.mark))
        for segment in mapped:
            segment.unlink(missing_ok=True)  # a stock server that is stopped leaves its own


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pushing(*words: str) -> Callable[[Place], list[object]]:
    """push.py to a server that is not there."""
    push = REPO / "examples" / "vllm_server" / "push.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", push]
    return lambda place: [
        *launcher,
        "--server",
        "http://127.0.0.1:9",
        "--model",
        place.material.model("qwen2"),
        "--tensor",
        "2",
        "--version",
        "1",
        *words,
    ]


def server() -> list[Case]:
    return [
        Case("jrn_server", "journeys", "a vLLM server takes weights, as its README says", served, (Ends(),), "command", 240),
        tool(
            "jrn_server_away",
            "a server that is not there",
            pushing(),
            Refused(("127.0.0.1:9", "server|reach|connect"), before="", codes=CODES),
        ),
        tool(
            "jrn_push_model",
            "a model that is not there",
            lambda place: [*pushing()(place), "--model", "/nowhere"],
            Refused(("/nowhere",), before="", codes=CODES),
        ),
    ]


def cases() -> list[Case]:
    return [*conversions(), *plans(), *configuration(), *server()]
