"""Sizes that do not divide, choices that do not go together, files and services not there."""

from __future__ import annotations

from pathlib import Path

from tests.trials import looks
from tests.trials.makers import looked_at, refused_toy, toy_case
from tests.trials.material import edit_json, toy
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

FORMAT = "reward.format_pattern='.*'"


def odd_model(place: Place, **values: object) -> list[str]:
    """The toy with a changed config.json: sizes are compared before weights are read."""
    model = place.material.copy_of("toy", place.folder / "model")
    edit_json(model / "config.json", **values)
    return [f"model.path={model}"]


def batches() -> list[Case]:
    """Batches that do not divide."""
    return [
        refused_toy(
            "cfg20",
            "minibatches of 3 of 8 prompts",
            ["batch.prompts_per_minibatch=3"],
            r"batch\.prompts_per_minibatch",
            "8",
        ),
        refused_toy(
            "cfg21",
            "fewer prompts than engines",
            [
                "parallel=single",
                "rollout.tensor=1",
                "batch.prompts_per_step=1",
                "batch.prompts_per_minibatch=1",
            ],
            r"batch\.prompts_per_step",
        ),
        refused_toy("cfg22", "no prompt", ["batch.prompts_per_step=0"], r"batch\.prompts_per_step"),
        refused_toy(
            "cfg23",
            "microbatch below one sequence",
            ["batch.tokens_per_microbatch=4"],
            r"batch\.tokens_per_microbatch",
            "10",
        ),
    ]


def layouts() -> list[Case]:
    """Layouts that do not divide, or do not fit the processes."""
    return [
        refused_toy("cfg24", "tensor 3 on 2 processes", ["parallel.tensor=3"], r"parallel", "3"),
        refused_toy(
            "cfg25", "engine on 4 of 2 processes", ["rollout.tensor=4"], r"rollout\.tensor", "4"
        ),
        refused_toy(
            "cfg26",
            "pipeline 3 on 2 processes",
            ["parallel=single", "parallel.pipeline=3"],
            "pipeline",
            "3",
        ),
        refused_toy(
            "cfg27",
            "virtual pipeline without pipeline",
            ["parallel.virtual_pipeline=2"],
            r"parallel\.virtual_pipeline",
        ),
        refused_toy(
            "cfg28",
            "sequence parallel without tensor",
            ["parallel=single", "parallel.sequence=true"],
            r"parallel\.sequence",
        ),
        refused_toy(
            "cfg29",
            "layers that do not divide",
            ["parallel=pp2", "parallel.virtual_pipeline=2"],
            r"parallel\.",
            "layers",
        ),
        refused_toy(
            "cfg30",
            "heads that do not divide",
            lambda place: odd_model(place, num_attention_heads=3, num_key_value_heads=3),
            r"parallel\.tensor",
            "heads",
        ),
        refused_toy(
            "cfg31",
            "more tokens than positions",
            ["rollout.max_response_tokens=100", "batch.tokens_per_microbatch=1000"],
            r"rollout\.max_",
            "64",
        ),
    ]


def limits() -> list[Case]:
    """Limits that are too small, or too large for the model."""
    return [
        refused_toy(
            "cfg32",
            "no prompt token",
            ["rollout.max_prompt_tokens=0"],
            r"rollout\.max_prompt_tokens",
        ),
        refused_toy(
            "cfg35",
            "a key-value cache of 10 KiB",
            ["rollout.kv_cache_gib=1e-5"],
            r"rollout\.kv_cache_gib",
        ),
        refused_toy(
            "cfg62", "pass@8 of one response", ["evaluation.pass_at=[8]"], r"evaluation\.pass_at"
        ),
        refused_toy(
            "cfg64",
            "four greedy responses",
            ["evaluation.responses_per_prompt=4"],
            r"evaluation\.(responses_per_prompt|temperature)",
        ),
        refused_toy(
            "cfg65",
            "a key-value cache of 100 GiB",
            ["rollout.kv_cache_gib=100"],
            r"kv_cache|key-value",
        ),
        toy_case(
            "cfg66",
            "context parallel on processors",
            ["parallel=single", "parallel.context=2"],
            Ends(),
            Refused((r"parallel\.context",)),
        ),
        refused_toy(
            "cfg75",
            "a part offloaded twice",
            ["memory.offload=[optimizer,optimizer]"],
            r"memory\.offload",
        ),
        refused_toy(
            "cfg84",
            "no minibatch token at all",
            ["batch.responses_per_prompt=0"],
            r"batch\.responses_per_prompt",
        ),
        refused_toy(
            "cfg100",
            "key-value heads that do not divide",
            lambda place: odd_model(place, num_attention_heads=6, num_key_value_heads=3),
            "key-value heads|kv",
        ),
    ]


def method_choices() -> list[Case]:
    """Parts of methods that do not go together."""
    return [
        refused_toy(
            "cfg33",
            "mapo with a format weight",
            ["method=mapo", "reward.format_weight=0.1", FORMAT],
            "format_weight|mapo|mixed",
        ),
        refused_toy(
            "cfg34",
            "groups of one response",
            ["batch.responses_per_prompt=1"],
            r"batch\.responses_per_prompt",
            "2",
        ),
        refused_toy(
            "cfg36",
            "a knob of another estimator",
            ["method.estimator.k=4"],
            r"method\.estimator\.k",
            "pass_at_k",
        ),
        refused_toy(
            "cfg37",
            "an estimator that does not exist",
            ["method.estimator.name=zzz"],
            r"method\.estimator",
            "zscore",
        ),
        refused_toy(
            "cfg38",
            "a shaper that does not exist",
            ["method.shaping.ddass={}"],
            r"method\.shaping\.ddass",
            "ddas",
        ),
    ]


def reward_choices() -> list[Case]:
    """Patterns and verifiers that do not go together."""
    return [
        refused_toy(
            "cfg39",
            "an answer pattern without a group",
            ["reward.answer_pattern='abc'"],
            r"reward\.answer_pattern",
            "group",
        ),
        refused_toy(
            "cfg40",
            "a pattern that is none",
            ["reward.format_pattern='('", "reward.format_weight=0.1"],
            r"reward\.format_pattern",
        ),
        refused_toy(
            "cfg41",
            "a format weight without a pattern",
            ["reward.format_weight=0.5"],
            r"reward\.format_weight",
        ),
        refused_toy(
            "cfg42",
            "a verifier that does not exist",
            ["reward.verifier=mat"],
            r"reward\.verifier",
            "math",
        ),
    ]


def format_choices() -> list[Case]:
    """Number formats and data that do not go together."""
    return [
        refused_toy(
            "cfg50",
            "FP8 without a GPU",
            ["precision=fp8_tensorwise"],
            r"precision\.fp8",
            "CUDA|GPU",
        ),
        refused_toy(
            "cfg51",
            "bfloat16 policy, float32 engine",
            ["precision=bf16"],
            r"rollout\.dtype|precision",
        ),
        refused_toy(
            "cfg71",
            "an FP8 engine without a GPU",
            ["rollout.quantization=fp8"],
            r"rollout\.quantization",
        ),
        refused_toy(
            "cfg72", "fused Adam without its library", ["precision.adam=fused"], r"precision\.adam"
        ),
        refused_toy(
            "cfg73",
            "moments in bfloat16",
            ["precision.adam_moments=bfloat16"],
            r"precision\.adam_moments",
        ),
        refused_toy(
            "cfg82",
            "durian without visual entropy",
            lambda place: ["method=durian", f"data.train={no_entropy(place)}"],
            "visual_entropy",
        ),
        refused_toy(
            "cfg83",
            "pass@k of more than the group",
            ["method=pass_at_k", "method.estimator.k=99"],
            "k\\b",
            "responses_per_prompt|16",
        ),
        refused_toy(
            "cfg101",
            "both of resume's words at once",
            ["resume.changed=perhaps"],
            r"resume\.changed",
            "allow|refuse",
        ),
    ]


def no_entropy(place: Place) -> Path:
    """The toy's rows without their visual entropy."""
    import json

    source = place.material.letters() / "data.jsonl"
    rows = [json.loads(line) | {"extra": {}} for line in source.read_text().splitlines()]
    target = place.folder / "data.jsonl"
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def outside() -> list[Case]:
    """Files and services that a run needs."""
    return [
        refused_toy("cfg58", "no training data", ["data.train=null"], r"data\.train"),
        refused_toy(
            "cfg67a",
            "data that do not exist",
            ["data.train=/nowhere/x.jsonl"],
            r"data\.train",
            "/nowhere/x.jsonl",
        ),
        refused_toy(
            "cfg67b",
            "a model that does not exist",
            ["model.path=/nowhere/model"],
            r"model\.path",
            "/nowhere/model",
        ),
        refused_toy(
            "cfg76",
            "a checkpoint that does not exist",
            ["resume=/nonexistent"],
            "resume",
            "/nonexistent",
        ),
        refused_toy("cfg77", "a word that resume does not know", ["resume=yes"], "resume", "auto"),
        Case("cfg67", "config", "wandb offline", wandb_offline, (Ends(),), "torchrun 2"),
        Case(
            "cfg68",
            "config",
            "wandb online without a key",
            wandb_online,
            (Refused((r"logging\.wandb|wandb",)),),
            "torchrun 2",
        ),
        refused_toy(
            "cfg81",
            "a word that wandb does not know",
            ["logging.wandb=on"],
            r"logging\.wandb",
            "online",
        ),
        refused_toy(
            "cfg102",
            "run_dir below a file",
            lambda place: [f"run_dir={a_file(place)}/run"],
            "run_dir|file",
        ),
        refused_toy(
            "cfg103", "run_dir that may not be made", ["run_dir=/proc/run"], "run_dir", "/proc/run"
        ),
    ]


def a_file(place: Place) -> Path:
    path = place.folder / "file"
    path.write_text("x")
    return path


def wandb_offline(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    outcome = looked_at(
        place.torchrun(toy(place.material, run_dir, "logging.wandb=offline")), run_dir
    )
    return outcome.noting(looks.files(run_dir, "wandb/offline-run-*") if outcome.code == 0 else [])


def wandb_online(place: Place) -> Outcome:
    home = place.folder / "home"
    home.mkdir()
    env = {"HOME": str(home), "WANDB_API_KEY": "", "NETRC": str(home / "netrc")}
    overrides = toy(place.material, place.folder / "run", "logging.wandb=online")
    return place.torchrun(overrides, env=env)


def cases() -> list[Case]:
    return [
        *batches(),
        *layouts(),
        *limits(),
        *method_choices(),
        *reward_choices(),
        *format_choices(),
        *outside(),
    ]
