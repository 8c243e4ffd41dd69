"""Wrong and odd configurations, as typed on the command line of two ranks."""

from __future__ import annotations

from tests.trials.makers import looked_at, refused_toy, toy_case
from tests.trials.material import toy
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused


def bare(name: str, title: str, words: list[str], *expected: Refused | Ends) -> Case:
    """The command line is ``words`` alone, without the toy's overrides."""

    def play(place: Place) -> Outcome:
        return place.torchrun(words)

    return Case(name, "config", title, play, expected, "torchrun 2")


def misspelled() -> list[Case]:
    """Words that name nothing: keys, options, values of the wrong type."""
    return [
        bare(
            "cfg01",
            "no arguments at all",
            [],
            Refused((r"model\.path", r"data\.train", r"data\.eval")),
        ),
        refused_toy(
            "cfg02",
            "typo of a key",
            ["optim.learning_rat=1"],
            "optim.learning_rat",
            r"optim\.learning_rate",
        ),
        refused_toy(
            "cfg03",
            "typo of a section",
            ["optimm.learning_rate=1e-3"],
            "optimm",
            "optim.learning_rate",
        ),
        refused_toy(
            "cfg04",
            "typo of a deep key",
            ["method.kl.coeff=0.1"],
            r"method\.kl\.coeff",
            r"method\.kl\.coef\b",
        ),
        refused_toy("cfg05", "typo of a group's option", ["precision=fp31"], "precision", "fp32"),
        refused_toy(
            "cfg06",
            "typo of an experiment",
            ["experiment=quickstart"],
            "experiment",
            "quickstart_cpu",
        ),
        refused_toy("cfg07", "typo of a method", ["method=gpro"], "method", "grpo"),
        refused_toy(
            "cfg08",
            "wrong types, all at once",
            ["seed=one", "trainer.num_steps=1.5", "batch.share_prompts=7"],
            "seed",
            r"trainer\.num_steps",
            r"batch\.share_prompts",
        ),
    ]


def foreign_words() -> list[Case]:
    """Options that are not there, sections that are no sections, words of other programs."""
    return [
        refused_toy("cfg47", "an option that does not exist", ["--foo"], "--foo", codes=(1, 2)),
        refused_toy(
            "cfg48",
            "--config-dir that does not exist",
            ["--config-dir", "/nonexistent"],
            "/nonexistent",
            codes=(1, 2),
        ),
        refused_toy("cfg49", "a section set to a number", ["optim=5"], r"\boptim\b"),
        refused_toy("cfg85", "a section deleted", ["~optim"], r"\boptim\b"),
        refused_toy(
            "cfg86", "+key that does not exist", ["+optim.lr=3"], r"optim\.lr", "learning_rate"
        ),
        refused_toy(
            "cfg88", "LoRA is asked for", ["model.lora.rank=8"], "lora", "not supported|unsupported"
        ),
        refused_toy(
            "cfg89",
            "tools of several turns are asked for",
            ["rollout.multi_turn=true"],
            "multi_turn",
            "not supported|unsupported|unknown key",
        ),
        refused_toy(
            "cfg90",
            "a key of verl",
            ["actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref",
            "unknown",
        ),
        refused_toy(
            "cfg91",
            "--plugin that does not exist",
            ["--plugin", "no_such_module_x"],
            "plugin",
            "no_such_module_x",
            codes=(1, 2),
        ),
        refused_toy("cfg92", "a section with null", ["reward=null"], r"\breward\b"),
    ]


def quoting() -> list[Case]:
    """What shells and Hydra do with letters of their own."""
    return [
        refused_toy("cfg43", "an unknown interpolation", ["run_dir=${oops}"], r"run_dir", "oops"),
        refused_toy(
            "cfg44", "a key without a value", ["optim.learning_rate"], r"optim\.learning_rate"
        ),
        refused_toy(
            "cfg45",
            "a comma that is not quoted",
            ["data.prompt_suffix=Think, then answer"],
            r"data\.prompt_suffix",
            "quot",
        ),
        toy_case("cfg46", "a key given twice: the last counts", ["seed=1", "seed=2"], Ends()),
        refused_toy("cfg52", "a sweep's value", ["seed=1,2"], r"\bseed\b", "sweep|quot"),
        refused_toy(
            "cfg57",
            "= in a value that is not quoted",
            ["data.train=reasoning_gym:chainsum?size=10"],
            r"data\.train",
            "quot",
        ),
        refused_toy(
            "cfg70",
            "~ at the start of a path",
            ["run_dir=~/x"],
            "run_dir|~",
            "quot|full path|absolute|\\$HOME",
        ),
        Case("cfg79", "config", "= in a path, quoted", equals_in_path, (Ends(),), "torchrun 2"),
        refused_toy("cfg93", "an empty value", ["model.path="], r"model\.path"),
        refused_toy("cfg94", "an empty run_dir", ["run_dir=''"], "run_dir"),
        refused_toy(
            "cfg95",
            "brackets that do not close",
            ["evaluation.pass_at=[1,2"],
            r"evaluation\.pass_at",
        ),
    ]


def rates() -> list[Case]:
    """Steps, rates and moments outside of what means something."""
    return [
        refused_toy("cfg09", "no step", ["trainer.num_steps=0"], r"trainer\.num_steps"),
        refused_toy(
            "cfg10", "a negative rate", ["optim.learning_rate=-1"], r"optim\.learning_rate"
        ),
        refused_toy("cfg11", "a rate of zero", ["optim.learning_rate=0"], r"optim\.learning_rate"),
        refused_toy(
            "cfg12", "an infinite rate", ["optim.learning_rate=inf"], r"optim\.learning_rate"
        ),
        toy_case(
            "cfg13",
            "a rate of 1e30, 5 steps",
            ["optim.learning_rate=1e30", "trainer.num_steps=5", "mismatch_limits.abort_above=null"],
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
        refused_toy(
            "cfg19",
            "a schedule that does not exist",
            ["optim.schedule=cosin"],
            r"optim\.schedule",
            "cosine",
        ),
    ]


def ranges() -> list[Case]:
    """Seeds, sampling, warm-up and weights outside of what means something."""
    not_finite = (r"not finite|non-?finite|nan",)
    return [
        refused_toy("cfg53", "a negative seed", ["seed=-1"], r"\bseed\b"),
        refused_toy(
            "cfg54",
            "a seed of 2**63-1",
            ["seed=9223372036854775807"],
            r"\bseed\b",
            r"2\*\*32|4294967295|4294967296",
        ),
        refused_toy("cfg55", "a seed of 1e20", ["seed=100000000000000000000"], r"\bseed\b"),
        refused_toy("cfg56", "a broken seed", ["seed=1.5"], r"\bseed\b"),
        refused_toy(
            "cfg59",
            "rollout temperature of zero",
            ["rollout.temperature=0"],
            r"rollout\.temperature",
        ),
        refused_toy("cfg60", "top_p above 1", ["rollout.top_p=1.5"], r"rollout\.top_p"),
        refused_toy("cfg61", "top_k of -5", ["rollout.top_k=-5"], r"rollout\.top_k"),
        refused_toy(
            "cfg63",
            "1000 warm-up steps of 1",
            ["optim.warmup_steps=1000"],
            r"optim\.warmup_steps",
            harm=False,
            warns=("warmup_steps",),
        ),
        toy_case(
            "cfg96",
            "weight decay that is nan",
            ["optim.weight_decay=nan"],
            Refused((r"optim\.weight_decay",)),
            Refused(not_finite, before="", within_s=90),
        ),
        refused_toy(
            "cfg97",
            "no loss weight: accuracy weight nan",
            ["reward.accuracy_weight=nan"],
            r"reward\.accuracy_weight",
        ),
        refused_toy(
            "cfg98",
            "checkpoints every -1 steps",
            ["checkpoint.every_steps=-1"],
            r"checkpoint\.every_steps",
        ),
        refused_toy(
            "cfg99",
            "clip of an infinite width",
            ["method.policy_loss.high=inf"],
            r"method\.policy_loss\.high",
            harm=False,
            warns=("high",),
        ),
    ]


def equals_in_path(place: Place) -> Outcome:
    run_dir = place.folder / "run=1"
    overrides = toy(place.material, place.folder / "unused", f"run_dir='{run_dir}'")
    return looked_at(place.torchrun(overrides), run_dir)


def cases() -> list[Case]:
    return [*misspelled(), *foreign_words(), *quoting(), *rates(), *ranges()]
