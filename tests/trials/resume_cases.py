"""Going on: the same command again, with other settings, from damaged and from foreign folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials import looks
from tests.trials.material import edit_json, edit_weights, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

STEPS = 2
SAVED = "checkpoint.every_steps=1"
ALLOWED = "resume.changed=allow"


def start_words(place: Place, run_dir: Path, *more: str) -> list[str]:
    """Two steps with a checkpoint each, of which both are kept."""
    return toy_alone(
        place.material, run_dir, f"trainer.num_steps={STEPS}", SAVED, "checkpoint.keep=2", *more
    )


def base(place: Place) -> Path:
    """A finished run of two steps in ``place.folder/run``, a copy of one that was made once."""

    def train(path: Path) -> None:
        outcome = place.warm(start_words(place, path))
        assert outcome.code == 0, f"the first run failed: {outcome.text[-1500:]}"

    source = place.material.made("runs/base", train)
    run_dir = Path(shutil.copytree(source, place.folder / "run"))
    if (run_dir / "config.json").is_file():
        edit_json(run_dir / "config.json", run_dir=str(run_dir))
    return run_dir


def resumed(
    name: str,
    title: str,
    change: Sequence[str] | Callable[[Place], Sequence[str]],
    *expected: Expected,
    spoil: Callable[[Path], object] = lambda run_dir: None,
    look: Callable[[Path, Outcome], Sequence[str]] = lambda run_dir, outcome: (),
    steps: int | None = None,
    limit_s: float = 90,
) -> Case:
    """The base run is spoiled, then started again with other overrides. ``steps``: what
    ``metrics.jsonl`` must hold when the second command ends well; ``look`` finds what is wrong."""

    def play(place: Place) -> Outcome:
        run_dir = base(place)
        spoil(run_dir)
        more = change(place) if callable(change) else change
        outcome = place.warm(start_words(place, run_dir, *more))
        if outcome.code == 0 and steps is not None:
            outcome = outcome.noting(looks.trained(run_dir, steps))
        return outcome if outcome.code is None else outcome.noting(look(run_dir, outcome))

    return Case(name, "resume", title, play, expected, "warm", limit_s)


def newest(run_dir: Path, step: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def recorded(run_dir: Path, outcome: Outcome) -> list[str]:
    """The change is written down in the folder: both words in one file."""
    for file in run_dir.glob("*.json*"):
        text = file.read_text()
        if "grpo" in text and "dapo" in text:
            return []
    return ["the change of method is not recorded in the folder"]


def other_weights(place: Place) -> list[str]:
    model = place.material.copy_of("toy", place.folder / "model")
    edit_weights(
        model, lambda tensors: tensors.update({key: value * 1.5 for key, value in tensors.items()})
    )
    return [f"model.path={model}", "trainer.num_steps=3"]


def other_shape(place: Place) -> list[str]:
    return [
        f"model.path={place.material.model('llama')}",
        "model.make_vocab_divisible_by=8",
        "trainer.num_steps=3",
    ]


def other_data(place: Place) -> list[str]:
    rows = (place.material.letters() / "data.jsonl").read_text().splitlines()
    file = place.folder / "other.jsonl"
    file.write_text("\n".join(reversed(rows)) + "\n")
    return [f"data.train={file}", "trainer.num_steps=3"]


def settings() -> list[Case]:
    """The same folder, other settings."""
    three = "trainer.num_steps=3"
    bf16 = ["precision=bf16", "rollout.dtype=bfloat16", "mismatch_limits.abort_above=null", three]
    return [
        resumed(
            "res_more", "more steps", ["trainer.num_steps=4"], Ends(("resumed from",)), steps=4
        ),
        resumed("res_same", "the same command again", [], Ends(), steps=2),
        resumed(
            "res_method",
            "another method",
            ["method=dapo", three],
            Refused(("method", r"resume\.changed")),
        ),
        resumed(
            "res_method_done",
            "another method, the run is finished",
            ["method=dapo"],
            Refused(("method", r"resume\.changed")),
        ),
        resumed(
            "res_method_allow",
            "another method, allowed",
            ["method=dapo", three, ALLOWED],
            Ends(("method",)),
            steps=3,
            look=recorded,
        ),
        resumed(
            "res_knob",
            "another knob of the method",
            ["method.policy_loss.high=0.28", three],
            Refused((r"policy_loss\.high", r"resume\.changed")),
        ),
        resumed(
            "res_seed", "another seed", ["seed=7", three], Refused(("seed", r"resume\.changed"))
        ),
        resumed(
            "res_data", "other data", other_data, Refused((r"data\.train", r"resume\.changed"))
        ),
        resumed("res_model", "a model of another shape", other_shape, Refused((r"model",))),
        resumed(
            "res_model_weights",
            "other weights of the same shape",
            other_weights,
            Refused((r"model\.path", r"resume\.changed")),
        ),
        resumed("res_precision", "another number format", bf16, Refused(("precision",))),
    ]


def said() -> list[Case]:
    """Other settings that do not change what is trained by name: said, or refused."""
    three = "trainer.num_steps=3"
    return [
        resumed(
            "res_lr",
            "another rate",
            ["optim.learning_rate=1e-4", three],
            Refused((r"optim\.learning_rate",), harm=False),
            Ends((r"optim\.learning_rate",)),
            steps=3,
        ),
        resumed(
            "res_kl",
            "another KL weight",
            ["method.kl.coef=0.5", three],
            Refused((r"method\.kl\.coef",), harm=False),
            Ends((r"method\.kl\.coef",)),
            steps=3,
        ),
        resumed(
            "res_batch",
            "another batch",
            ["batch.responses_per_prompt=8", three],
            Refused((r"batch\.responses_per_prompt",), harm=False),
            Ends((r"batch\.responses_per_prompt",)),
            steps=3,
        ),
        resumed(
            "res_reward",
            "another reward",
            ["reward.accuracy_weight=0.5", three],
            Refused((r"reward\.accuracy_weight",), harm=False),
            Ends((r"reward\.accuracy_weight",)),
            steps=3,
        ),
        resumed(
            "res_fewer",
            "fewer steps than are done",
            ["trainer.num_steps=1"],
            Refused((r"trainer\.num_steps",), harm=False),
            Ends((r"num_steps",)),
        ),
        resumed(
            "res_logging",
            "settings that change nothing",
            ["logging.log_samples=1", "logging.tensorboard=true", three],
            Ends(("resumed from",)),
            steps=3,
        ),
    ]


def metrics_files() -> list[Case]:
    three = ["trainer.num_steps=3"]

    def broken(run_dir: Path) -> None:
        file = run_dir / "metrics.jsonl"
        first, *rest = file.read_text().splitlines()
        file.write_text("\n".join([first, "{broken", *rest]) + "\n")

    def half(run_dir: Path) -> None:
        file = run_dir / "metrics.jsonl"
        file.write_text(file.read_text() + '{"step": 3, "rew')

    def lost_config(run_dir: Path) -> None:
        (run_dir / "config.json").unlink()

    bad = Refused((r"metrics\.jsonl",))
    config = Refused((r"config\.json",))
    return [
        resumed(
            "res_metricsbad",
            "a broken line in the metrics",
            three,
            bad,
            Ends(("aside|kept|skipped",), harm=True),
            spoil=broken,
        ),
        resumed(
            "res_metricshalf",
            "half a last line",
            three,
            Ends(("resumed from",)),
            spoil=half,
            steps=3,
        ),
        resumed(
            "res_metricsgone",
            "no metrics, but checkpoints",
            three,
            Ends(("resumed from",)),
            spoil=lambda run: (run / "metrics.jsonl").unlink(),
        ),
        resumed(
            "res_configgone",
            "no config.json",
            three,
            config,
            Ends((r"config\.json",)),
            spoil=lost_config,
        ),
        resumed(
            "res_configbad",
            "config.json is no JSON",
            three,
            config,
            Ends((r"config\.json",)),
            spoil=lambda run: (run / "config.json").write_text("{"),
        ),
    ]


def from_path(
    name: str,
    title: str,
    target: Callable[[Path], Path],
    *expected: Expected,
    spoil: Callable[[Path], object] = lambda run: None,
    more: Sequence[str] = (),
) -> Case:
    """``resume=PATH`` into a new folder."""

    def play(place: Place) -> Outcome:
        source = base(place)
        spoil(source)
        words = start_words(
            place, place.folder / "new", "trainer.num_steps=3", f"resume={target(source)}", *more
        )
        outcome = place.warm(words)
        return (
            outcome.noting(looks.trained_from(place.folder / "new", 3))
            if outcome.code == 0
            else outcome
        )

    return Case(name, "resume", title, play, expected, "warm")


def moved(place: Place) -> Outcome:
    """The folder of a run has been moved."""
    run_dir = base(place)
    target = place.folder / "elsewhere"
    run_dir.rename(target)
    outcome = place.warm(start_words(place, target, "trainer.num_steps=3"))
    return outcome.noting(looks.trained(target, 3)) if outcome.code == 0 else outcome


def never(place: Place) -> Outcome:
    return place.warm(start_words(place, base(place), "resume=never"))


def never_new(place: Place) -> Outcome:
    run_dir = place.folder / "new"
    outcome = place.warm(start_words(place, run_dir, "resume=never"))
    return outcome.noting(looks.trained(run_dir, STEPS)) if outcome.code == 0 else outcome


def shard(path: Path) -> Path:
    return max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)


def cut(path: Path) -> None:
    file = shard(path)
    file.write_bytes(file.read_bytes()[:-8])


def flip(path: Path) -> None:
    """4000 bytes in the middle inverted; the size stays."""
    file = shard(path)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = bytes(255 - byte for byte in content[middle : middle + 4000])
    file.write_bytes(bytes(content))


def by_path() -> list[Case]:
    return [
        from_path(
            "res_path_new", "a checkpoint into a new folder", newest, Ends(("resumed from",))
        ),
        from_path(
            "res_path_flip",
            "a checkpoint with inverted bytes",
            newest,
            Refused(("step_000002", "digest|damaged|written")),
            spoil=lambda run: flip(newest(run)),
        ),
        from_path(
            "res_path_cut",
            "a cut checkpoint",
            newest,
            Refused(("step_000002",)),
            spoil=lambda run: cut(newest(run)),
        ),
        from_path(
            "res_path_run",
            "the folder of a run",
            lambda run: run,
            Refused(("resume", "checkpoint")),
        ),
        from_path(
            "res_path_export",
            "an export",
            lambda run: run / "export",
            Refused(("resume|checkpoint", "export")),
        ),
        from_path(
            "res_path_file",
            "a file",
            lambda run: run / "config.json",
            Refused(("resume", r"config\.json")),
        ),
        Case(
            "res_moved", "resume", "the folder was moved", moved, (Ends(("resumed from",)),), "warm"
        ),
        Case(
            "res_never_used",
            "resume",
            "resume=never on a used folder",
            never,
            (Refused(("resume", "never", "run_dir")),),
            "warm",
        ),
        Case(
            "res_never_new", "resume", "resume=never on a new folder", never_new, (Ends(),), "warm"
        ),
    ]


def cases() -> list[Case]:
    return [*settings(), *said(), *metrics_files(), *by_path()]
