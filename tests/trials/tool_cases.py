"""Commands beside training: plans, configuration, help."""

from __future__ import annotations

from pathlib import Path

from tests.launch import REPO
from tests.trials.makers import tool
from tests.trials.material import toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected

LAYOUT = ("--train", "tp=8,pp=4,dp=2", "--rollout", "tp=8,dp=8")
EXPERTS = "--model qwen3-235b-a22b --train tp=4,pp=2,dp=4,ep=8 --rollout tp=8,dp=4".split()


def large(place: Place) -> Path:
    from tests.e2e.toy import write_large_config

    return place.material.made("large", write_large_config)


def memory(name: str, title: str, size: str, words: list[str], *expected: Expected) -> Case:
    """Whether a model of 72B fits on ``size``, processes and GiB of a GPU."""
    world, gpu_gib = size.split()
    plan = [REPO / "tools" / "plan_memory.py", "--world-size", world, "--gpu-gib", gpu_gib]
    return tool(name, title, lambda place: [*plan, f"model.path={large(place)}", *words], *expected)


def sync(name: str, title: str, *words: str, says: str = "") -> Case:
    """How weights would move."""
    return tool(name, title, lambda place: [REPO / "tools" / "plan_sync.py", *words], Ends((says,)))


def shown(name: str, title: str, program: str, *words: str, says: tuple[str, ...]) -> Case:
    line = ["-m", f"megatron_rl.{program}", *words]
    return tool(name, title, lambda place: line, Ends(says, within_s=15))


def job(place: Place) -> list[object]:
    words = toy_alone(place.material, place.folder / "run")
    return ["-m", "megatron_rl.train", "--cfg", "job", *words]


def cases() -> list[Case]:
    eight = ["parallel=tp8", "rollout.tensor=8"]
    too_large = Ends(("does not fit", "optimizer"), codes=(1,))
    fits = [*eight, "parallel.pipeline=4"]
    return [
        memory("jrn_memory_fits", "72B on 64 large GPUs", "64 141", fits, Ends(("GiB",))),
        memory("jrn_memory_large", "72B on 8 GPUs", "8 80", eight, too_large),
        sync("jrn_sync_72b", "72B", "--model", "72b", *LAYOUT),
        sync("jrn_sync_json", "as JSON", "--model", "72b", *LAYOUT, "--json", says=r"\{"),
        sync("jrn_sync_moe", "a mixture of experts", *EXPERTS),
        tool("jrn_cfg", "--cfg job", job, Ends(("learning_rate",))),
        shown("jrn_cfg_bare", "--cfg job alone", "train", "--cfg", "job", says=("num_steps",)),
        shown("jrn_help", "--help of train", "train", "--help", says=("method", "--cfg")),
        shown("jrn_help_sweep", "--help of the sweep", "sweep", "--help", says=("--out",)),
        shown("jrn_help_sample", "--help of sample", "sample", "--help", says=("SOURCE",)),
    ]
