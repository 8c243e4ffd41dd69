"""Commands beside training, where they meet something odd. As the documents print them they are run
by tests/test_commands.py."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launch import REPO
from tests.trials.machine_cases import filled
from tests.trials.makers import CODES, finished_run, refused, tool
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

CONVERT = REPO / "tools" / "convert_checkpoint.py"
PUSH = REPO / "examples" / "vllm_server" / "push.py"
ENGINE = (
    "rollout.dtype=float32 rollout.max_response_tokens=4 rollout.max_prompt_tokens=32"
    " rollout.kv_cache_gib=0.03125"
).split()


def large(place: Place) -> list[object]:
    """A plan for a model of 72B on 8 GPUs."""
    from tests.e2e.toy import write_large_config

    plan = [REPO / "tools" / "plan_memory.py", "--world-size", 8, "--gpu-gib", 80]
    model = f"model.path={place.material.made('large', write_large_config)}"
    return [*plan, model, "parallel=tp8", "rollout.tensor=8"]


def sampled(model: Path, prompt: str) -> list[object]:
    return ["-m", "megatron_rl.sample", model, "--prompt", prompt, *ENGINE]


def pushed(place: Place, *more: str) -> list[object]:
    """Weights for a server that is not there."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PUSH]
    server = ["--server", "http://127.0.0.1:9", "--tensor", "2", "--version", "1"]
    return [*launcher, *server, "--model", place.material.model("qwen2"), *more]


def full_target(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 1) as disk:
        filled(place, disk)
        words = [CONVERT, "to-megatron", place.material.model("llama"), disk / "out"]
        return place.command([sys.executable, *words])


def shown(program: str, *says: str) -> Case:
    """Its help, soon."""
    line = ["-m", f"megatron_rl.{program}", "--help"]
    name = f"jrn_help_{program}"
    return tool(name, f"--help of {program}", lambda place: line, Ends(says, within_s=15))


def cases() -> list[Case]:
    too_large = Ends(("does not fit", "optimizer"), codes=(1,))
    away = Refused(("127.0.0.1:9", "server|reach|connect"), before="", codes=CODES)
    no_model = Refused(("/nowhere",), before="", codes=CODES)
    too_long = Refused(("max_prompt_tokens|longer",), before="", codes=CODES)
    full = refused("no space|room|full|out")
    long = "1 + " * 500
    return [
        tool("jrn_memory_large", "72B on 8 GPUs", large, too_large),
        tool(
            "jrn_sample_export",
            "sample from an export",
            lambda place: sampled(finished_run(place) / "export", "a"),
            Ends(),
        ),
        tool(
            "jrn_sample_long",
            "a prompt longer than the engine takes",
            lambda place: sampled(place.material.model("llama"), long),
            too_long,
        ),
        tool("jrn_server_away", "a server that is not there", pushed, away),
        tool(
            "jrn_push_model",
            "a model that is not there",
            lambda place: pushed(place, "--model", "/nowhere"),
            no_model,
        ),
        Case(
            "jrn_convert_full",
            "journeys",
            "a target without room",
            full_target,
            (full,),
            "command",
            needs=("root",),
        ),
        shown("train", "method", "--cfg"),
        shown("sweep", "--out"),
        shown("sample", "SOURCE"),
    ]
