"""Wrong and odd configurations, as typed on the command line of two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.trials import looks
from tests.trials.makers import looked_at, refused_toy, toy_case
from tests.trials.material import edit_json, toy
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

FORMAT = "reward.format_pattern='.*'"


def bare(name: str, title: str, words: list[str], *expected: Refused | Ends) -> Case:
    """The command line is ``words`` alone, without the toy's overrides."""

    def play(place: Place) -> Outcome:
        return place.torchrun(words)

    return Case(name, "config", title, play, expected, "torchrun 2")


def odd_model(place: Place, **values: object) -> list[str]:
    """The toy with a changed config.json: sizes are compared before weights are read."""
    model = place.material.copy_of("toy", place.folder / "model")
    edit_json(model / "config.json", **values)
    return [f"model.path={model}"]


def words_and_keys() -> list[Case]:
    """Words that name nothing."""
    return [
        bare("cfg01", "no arguments at all", [], Refused((r"model\.path", r"data\.train", r"data\.eval"))),
        refused_toy("cfg02", "typo of a key", ["optim.learning_rat=1"], "optim.learning_rat", r"optim\.learning_rate"),
        refused_toy("cfg03", "typo of a section", ["optimm.learning_rate=1e-3"], "optimm", "optim.learning_rate"),
        refused_toy("cfg04", "typo of a deep key", ["method.kl.coeff=0.1"], r"method\.kl\.coeff", r"method\.kl\.coef\b"),
        refused_toy("cfg05", "typo of a group's option", ["precision=fp31"], "precision", "fp32"),
        refused_toy("cfg06", "typo of an experiment", ["experiment=quickstart"], "experiment", "quickstart_cpu"),
        refused_toy("cfg07", "typo of a method", ["method=gpro"], "method", "grpo"),
        refused_toy(
            "cfg08",
            "wrong types, all at once",
            ["seed=one", "trainer.num_steps=1.5", "batch.share_prompts=7"],
            "seed",
            r"trainer\.num_steps",
            r"batch\.share_prompts",
        ),
        refused_toy("cfg47", "an option that does not exist", ["--foo"], "--foo", codes=(1, 2)),
        refused_toy("cfg48", "--config-dir that does not exist", ["--config-dir", "/nonexistent"], "/nonexistent", codes=(1, 2)),
        refused_toy("cfg49", "a section set to a number", ["optim=5"], r"\boptim\b"),
        refused_toy("cfg85", "a section deleted", ["~optim"], r"\boptim\b"),
        refused_toy("cfg86", "+key that does not exist", ["+optim.lr=3"], r"optim\.lr", "learning_rate"),
        refused_toy("cfg88", "LoRA is asked for", ["model.lora.rank=8"], "lora", "not supported|unsupported"),
        refused_toy(
            "cfg89",
            "tools of several turns are asked for",
            ["rollout.multi_turn=true"],
            "multi_turn",
            "not supported|unsupported|unknown key",
        ),
        refused_toy("cfg90", "a key of verl", ["actor_rollout_ref.rollout.n=8"], "actor_rollout_ref", "unknown"),
        refused_toy("cfg91", "--plugin that does not exist", ["--plugin", "no_such_module_x"], "plugin", "no_such_module_x", codes=(1, 2)),
        refused_toy("cfg92", "a section with null", ["reward=null"], r"\breward\b"),
    ]


def quoting() -> list[Case]:
    """What shells and Hydra do with letters of their own."""
    return [
        refused_toy("cfg43", "an unknown interpolation", ["run_dir=${oops}"], r"run_dir", "oops"),
        refused_toy("cfg44", "a key without a value", ["optim.learning_rate"], r"optim\.learning_rate"),
        refused_toy("cfg45", "a comma that is not quoted", ["data.prompt_suffix=Think, then answer"], r"data\.prompt_suffix", "quot"),
        toy_case("cfg46", "a key given twice: the last counts", ["seed=1", "seed=2"], Ends()),
        refused_toy("cfg52", "a sweep's value", ["seed=1,2"], r"\bseed\b", "sweep|quot"),
        refused_toy("cfg57", "= in a value that is not quoted", ["data.train=reasoning_gym:chainsum?size=10"], r"data\.train", "quot"),
        refused_toy("cfg70", "~ at the start of a path", ["run_dir=~/x"], "run_dir|~", "quot|full path|absolute|\\$HOME"),
        Case("cfg79", "config", "= in a path, quoted", equals_in_path, (Ends(),), "torchrun 2"),
        refused_toy("cfg93", "an empty value", ["model.path="], r"model\.path"),
        refused_toy("cfg94", "an empty run_dir", ["run_dir=''"], "run_dir"),
        refused_toy("cfg95", "brackets that do not close", ["evaluation.pass_at=[1,2"], r"evaluation\.pass_at"),
    ]


def numbers() -> list[Case]:
    """Values outside of what means something."""
    not_finite = (r"not finite|non-?finite|nan",)
    return [
        refused_toy("cfg09", "no step", ["trainer.num_steps=0"], r"trainer\.num_steps"),
        refused_toy("cfg10", "a negative rate", ["optim.learning_rate=-1"], r"optim\.learning_rate"),
        refused_toy("cfg11", "a rate of zero", ["optim.learning_rate=0"], r"optim\.learning_rate"),
        refused_toy("cfg12", "an infinite rate", ["optim.learning_rate=inf"], r"optim\.learning_rate"),
        toy_case(
            "cfg13",
            "a rate of 1e30, 5 steps",
            ["optim.learning_rate=1e30", "trainer.num_steps=5", "mismatch_alarm.abort_above=null"],
            Refused((r"optim\.learning_rate",)),
            Refused((r"not finite|non-?finite",), before="", within_s=90, max_lines=20),
            steps=5,
        ),
        refused_toy(
            "cfg14",
            "lowest rate above the rate",
            ["optim.min_learning_rate=1"],
            r"optim\.min_learning_rate",
            harm=False,
            warns=(r"min_learning_rate",),
        ),
        refused_toy("cfg15", "beta1 of 1", ["optim.beta1=1.0"], r"optim\.beta1"),
        refused_toy("cfg16", "beta2 above 1", ["optim.beta2=1.5"], r"optim\.beta2"),
        refused_toy("cfg17", "a negative clip", ["optim.clip_grad=-1"], r"optim\.clip_grad"),
        refused_toy("cfg18", "eps of zero", ["optim.eps=0"], r"optim\.eps"),
        refused_toy("cfg19", "a schedule that does not exist", ["optim.schedule=cosin"], r"optim\.schedule", "cosine"),
        refused_toy("cfg53", "a negative seed", ["seed=-1"], r"\bseed\b"),
        refused_toy("cfg54", "a seed of 2**63-1", ["seed=9223372036854775807"], r"\bseed\b", r"2\*\*32|4294967295|4294967296"),
        refused_toy("cfg55", "a seed of 1e20", ["seed=100000000000000000000"], r"\bseed\b"),
        refused_toy("cfg56", "a broken seed", ["seed=1.5"], r"\bseed\b"),
        refused_toy("cfg59", "rollout temperature of zero", ["rollout.temperature=0"], r"rollout\.temperature"),
        refused_toy("cfg60", "top_p above 1", ["rollout.top_p=1.5"], r"rollout\.top_p"),
        refused_toy("cfg61", "top_k of -5", ["rollout.top_k=-5"], r"rollout\.top_k"),
        refused_toy(
            "cfg63", "1000 warm-up steps of 1", ["optim.warmup_steps=1000"], r"optim\.warmup_steps", harm=False, warns=("warmup_steps",)
        ),
        toy_case(
            "cfg96",
            "weight decay that is nan",
            ["optim.weight_decay=nan"],
            Refused((r"optim\.weight_decay",)),
            Refused(not_finite, before="", within_s=90),
        ),
        refused_toy("cfg97", "no loss weight: accuracy weight nan", ["reward.accuracy_weight=nan"], r"reward\.accuracy_weight"),
        refused_toy("cfg98", "checkpoints every -1 steps", ["checkpoint.every_steps=-1"], r"checkpoint\.every_steps"),
        refused_toy(
            "cfg99", "clip of an infinite width", ["method.policy_loss.high=inf"], r"method\.policy_loss\.high", harm=False, warns=("high",)
        ),
    ]


def sizes() -> list[Case]:
    """Sizes that must divide or fit."""
    return [
        refused_toy("cfg20", "minibatches of 3 of 8 prompts", ["batch.prompts_per_minibatch=3"], r"batch\.prompts_per_minibatch", "8"),
        refused_toy(
            "cfg21",
            "fewer prompts than engines",
            ["parallel=single", "rollout.tensor=1", "batch.prompts_per_step=1", "batch.prompts_per_minibatch=1"],
            r"batch\.prompts_per_step",
        ),
        refused_toy("cfg22", "no prompt", ["batch.prompts_per_step=0"], r"batch\.prompts_per_step"),
        refused_toy("cfg23", "microbatch below one sequence", ["batch.tokens_per_microbatch=4"], r"batch\.tokens_per_microbatch", "10"),
        refused_toy("cfg24", "tensor 3 on 2 processes", ["parallel.tensor=3"], r"parallel", "3"),
        refused_toy("cfg25", "engine on 4 of 2 processes", ["rollout.tensor=4"], r"rollout\.tensor", "4"),
        refused_toy("cfg26", "pipeline 3 on 2 processes", ["parallel=single", "parallel.pipeline=3"], "pipeline", "3"),
        refused_toy("cfg27", "virtual pipeline without pipeline", ["parallel.virtual_pipeline=2"], r"parallel\.virtual_pipeline"),
        refused_toy("cfg28", "sequence parallel without tensor", ["parallel=single", "parallel.sequence=true"], r"parallel\.sequence"),
        refused_toy("cfg29", "layers that do not divide", ["parallel=pp2", "parallel.virtual_pipeline=2"], r"parallel\.", "layers"),
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
        refused_toy("cfg32", "no prompt token", ["rollout.max_prompt_tokens=0"], r"rollout\.max_prompt_tokens"),
        refused_toy("cfg35", "a key-value cache of 10 KiB", ["rollout.kv_cache_gib=1e-5"], r"rollout\.kv_cache_gib"),
        refused_toy("cfg62", "pass@8 of one response", ["evaluation.pass_at=[8]"], r"evaluation\.pass_at"),
        refused_toy(
            "cfg64", "four greedy responses", ["evaluation.responses_per_prompt=4"], r"evaluation\.(responses_per_prompt|temperature)"
        ),
        refused_toy("cfg65", "a key-value cache of 100 GiB", ["rollout.kv_cache_gib=100"], r"kv_cache|key-value"),
        toy_case(
            "cfg66",
            "context parallel on processors",
            ["parallel=single", "parallel.context=2"],
            Ends(),
            Refused((r"parallel\.context",)),
        ),
        refused_toy("cfg75", "a part offloaded twice", ["memory.offload=[optimizer,optimizer]"], r"memory\.offload"),
        refused_toy("cfg84", "no minibatch token at all", ["batch.responses_per_prompt=0"], r"batch\.responses_per_prompt"),
        refused_toy(
            "cfg100", "key-value heads that do not divide", lambda place: odd_model(place, num_key_value_heads=1), "key-value heads|kv"
        ),
    ]


def choices() -> list[Case]:
    """Choices that do not go together."""
    return [
        refused_toy("cfg33", "mapo with a format weight", ["method=mapo", "reward.format_weight=0.1", FORMAT], "format_weight|mapo|mixed"),
        refused_toy("cfg34", "groups of one response", ["batch.responses_per_prompt=1"], r"batch\.responses_per_prompt", "2"),
        refused_toy("cfg36", "a knob of another estimator", ["method.estimator.k=4"], r"method\.estimator\.k", "pass_at_k"),
        refused_toy("cfg37", "an estimator that does not exist", ["method.estimator.name=zzz"], r"method\.estimator", "zscore"),
        refused_toy("cfg38", "a shaper that does not exist", ["method.shaping.ddass={}"], r"method\.shaping\.ddass", "ddas"),
        refused_toy("cfg39", "an answer pattern without a group", ["reward.answer_pattern='abc'"], r"reward\.answer_pattern", "group"),
        refused_toy(
            "cfg40", "a pattern that is none", ["reward.format_pattern='('", "reward.format_weight=0.1"], r"reward\.format_pattern"
        ),
        refused_toy("cfg41", "a format weight without a pattern", ["reward.format_weight=0.5"], r"reward\.format_weight"),
        refused_toy("cfg42", "a verifier that does not exist", ["reward.verifier=mat"], r"reward\.verifier", "math"),
        refused_toy("cfg50", "FP8 without a GPU", ["precision=fp8_tensorwise"], r"precision\.fp8", "CUDA|GPU"),
        refused_toy("cfg51", "bfloat16 policy, float32 engine", ["precision=bf16"], r"rollout\.dtype|precision"),
        refused_toy("cfg71", "an FP8 engine without a GPU", ["rollout.quantization=fp8"], r"rollout\.quantization"),
        refused_toy("cfg72", "fused Adam without its library", ["precision.adam=fused"], r"precision\.adam"),
        refused_toy("cfg73", "moments in bfloat16", ["precision.adam_moments=bfloat16"], r"precision\.adam_moments"),
        refused_toy(
            "cfg74", "planned sync of two dtypes", ["weight_sync.path=plan", "rollout.dtype=bfloat16"], r"weight_sync\.path|rollout\.dtype"
        ),
        refused_toy(
            "cfg82", "durian without visual entropy", lambda place: ["method=durian", f"data.train={no_entropy(place)}"], "visual_entropy"
        ),
        refused_toy(
            "cfg83", "pass@k of more than the group", ["method=pass_at_k", "method.estimator.k=99"], "k\\b", "responses_per_prompt|16"
        ),
        refused_toy("cfg101", "both of resume's words at once", ["resume.changed=perhaps"], r"resume\.changed", "allow|refuse"),
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
        refused_toy("cfg67a", "data that do not exist", ["data.train=/nowhere/x.jsonl"], r"data\.train", "/nowhere/x.jsonl"),
        refused_toy("cfg67b", "a model that does not exist", ["model.path=/nowhere/model"], r"model\.path", "/nowhere/model"),
        refused_toy("cfg76", "a checkpoint that does not exist", ["resume=/nonexistent"], "resume", "/nonexistent"),
        refused_toy("cfg77", "a word that resume does not know", ["resume=yes"], "resume", "auto"),
        Case("cfg67", "config", "wandb offline", wandb_offline, (Ends(),), "torchrun 2"),
        Case("cfg68", "config", "wandb online without a key", wandb_online, (Refused((r"logging\.wandb|wandb",)),), "torchrun 2"),
        refused_toy("cfg81", "a word that wandb does not know", ["logging.wandb=on"], r"logging\.wandb", "online"),
        refused_toy("cfg102", "run_dir below a file", lambda place: [f"run_dir={a_file(place)}/run"], "run_dir|file"),
        refused_toy("cfg103", "run_dir that may not be made", ["run_dir=/proc/run"], "run_dir", "/proc/run"),
    ]


def equals_in_path(place: Place) -> Outcome:
    run_dir = place.folder / "run=1"
    overrides = toy(place.material, place.folder / "unused", f"run_dir='{run_dir}'")
    return looked_at(place.torchrun(overrides), run_dir)


def a_file(place: Place) -> Path:
    path = place.folder / "file"
    path.write_text("x")
    return path


def wandb_offline(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    outcome = looked_at(place.torchrun(toy(place.material, run_dir, "logging.wandb=offline")), run_dir)
    return outcome.noting(looks.files(run_dir, "wandb/offline-run-*") if outcome.code == 0 else [])


def wandb_online(place: Place) -> Outcome:
    home = place.folder / "home"
    home.mkdir()
    env = {"HOME": str(home), "WANDB_API_KEY": "", "NETRC": str(home / "netrc")}
    overrides = toy(place.material, place.folder / "run", "logging.wandb=online")
    return place.torchrun(overrides, env=env)


def cases() -> list[Case]:
    return [*words_and_keys(), *quoting(), *numbers(), *sizes(), *choices(), *outside()]
