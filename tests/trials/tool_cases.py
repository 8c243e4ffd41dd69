"""Commands beside training: conversions, plans, configuration, weights for a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.launch import REPO
from tests.trials.makers import refused, tool
from tests.trials.material import small, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Refused

MEMORY = REPO / "tools" / "plan_memory.py"
SYNC = REPO / "tools" / "plan_sync.py"


def large(place: Place) -> Path:
    from tests.e2e.toy import write_large_config

    return place.material.made("large", write_large_config)


def memory(
    name: str,
    title: str,
    world: int,
    gpu_gib: float,
    words: Callable[[Place], Sequence[str]],
    *expected: Expected,
) -> Case:
    def line(place: Place) -> list[object]:
        return [MEMORY, "--world-size", world, "--gpu-gib", gpu_gib, *words(place)]

    return tool(name, title, line, *expected)


def sync(name: str, title: str, words: Sequence[str], *expected: Expected) -> Case:
    return tool(name, title, lambda place: [SYNC, *words], *expected)


def memory_plans() -> list[Case]:
    """Whether a model of 72B fits."""
    model = lambda place: f"model.path={large(place)}"  # noqa: E731
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
        memory(
            "jrn_memory_seven",
            "7 processes",
            7,
            80,
            lambda place: [model(place), "parallel=tp8"],
            refused("7"),
        ),
        memory(
            "jrn_memory_zero", "no GPU", 0, 80, lambda place: [model(place)], refused("world-size")
        ),
    ]


def sync_plans() -> list[Case]:
    """How weights would move."""
    layout = ["--train", "tp=8,pp=4,dp=2", "--rollout", "tp=8,dp=8"]
    return [
        sync("jrn_sync_72b", "72B", ["--model", "72b", *layout], Ends()),
        sync("jrn_sync_json", "as JSON", ["--model", "72b", *layout, "--json"], Ends((r"\{",))),
        sync(
            "jrn_sync_moe",
            "a mixture of experts",
            "--model qwen3-235b-a22b --train tp=4,pp=2,dp=4,ep=8 --rollout tp=8,dp=4".split(),
            Ends(),
            refused("layers|94"),
        ),
        sync(
            "jrn_sync_model", "a model nobody knows", ["--model", "nope", *layout], refused("nope")
        ),
        sync(
            "jrn_sync_layout",
            "a layout that does not divide",
            ["--model", "72b", "--train", "tp=7,pp=4,dp=2", "--rollout", "tp=8,dp=7"],
            refused("tp|7"),
        ),
        sync(
            "jrn_sync_word",
            "a word that is no layout",
            ["--model", "72b", "--train", "tensor=8", "--rollout", "tp=8"],
            refused("tensor"),
        ),
        sync(
            "jrn_sync_ranks",
            "sides of different sizes",
            ["--model", "72b", "--train", "tp=8,pp=1,dp=1", "--rollout", "tp=8,dp=2"],
            refused("8|16"),
        ),
    ]


def configuration() -> list[Case]:
    """The configuration, printed, and the help of each command."""
    train = ("-m", "megatron_rl.train")
    job = (*train, "--cfg", "job")
    return [
        tool(
            "jrn_cfg",
            "--cfg job",
            lambda place: [
                *train,
                "--cfg",
                "job",
                *toy_alone(place.material, place.folder / "run"),
            ],
            Ends(("learning_rate",)),
        ),
        tool(
            "jrn_cfg_typo",
            "--cfg job with an unknown key",
            lambda place: [*job, "optim.lr=3"],
            refused(r"optim\.lr", "learning_rate"),
        ),
        tool(
            "jrn_cfg_bare",
            "--cfg job without anything",
            lambda place: job,
            Ends(("num_steps",)),
        ),
        tool(
            "jrn_help",
            "--help of the trainer",
            lambda place: [*train, "--help"],
            Ends(("method", "--cfg"), within_s=15),
        ),
        tool(
            "jrn_help_sweep",
            "--help of the sweep",
            lambda place: ["-m", "megatron_rl.sweep", "--help"],
            Ends(("--out",), within_s=15),
        ),
        tool(
            "jrn_help_sample",
            "--help of sample",
            lambda place: ["-m", "megatron_rl.sample", "--help"],
            Ends(("SOURCE",), within_s=15),
        ),
    ]


def sweeps() -> list[Case]:
    """Sweeps that cannot run, and a model of a kind that is not trained."""
    sweep = ("-m", "megatron_rl.sweep", "--nproc", "2", "--out")
    three_seeds = ("model.path=m", "data.train=a.jsonl", "data.eval=a.jsonl", "seed=1,1,2")
    return [
        tool(
            "jrn_sweep_typo",
            "a sweep with a typo",
            lambda place: [*sweep, place.folder / "runs", "method=gpro,dapo"],
            refused("gpro", "grpo"),
        ),
        tool(
            "jrn_sweep_twice",
            "a sweep with the same run twice",
            lambda place: [*sweep, place.folder / "runs", *three_seeds],
            refused("twice|seed=1"),
        ),
        tool(
            "jrn_vision",
            "a vision model by its configuration",
            vision,
            Refused(("Qwen2VL", "support")),
        ),
    ]


def vision(place: Place) -> list[object]:
    model = place.material.copy_of("llama", place.folder / "model")
    (model / "config.json").write_text(
        '{"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",'
        ' "vision_config": {}}'
    )
    return ["-m", "megatron_rl.train", *small(model, place.material.rows(), place.folder / "run")]


def cases() -> list[Case]:
    return [*memory_plans(), *sync_plans(), *configuration(), *sweeps()]
