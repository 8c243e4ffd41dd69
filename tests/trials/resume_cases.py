"""Going on: the same command again, with other settings, from damaged and from foreign folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.trials import looks
from tests.trials.material import edit_json, edit_weights, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

STEPS = 2
SAVED = "checkpoint.every_steps=1"
ALLOWED = "resume.changed=allow"


def start_words(place: Place, run_dir: Path, *more: str) -> list[str]:
    """Two steps with a checkpoint each, of which both are kept."""
    return toy_alone(place.material, run_dir, f"trainer.num_steps={STEPS}", SAVED, "checkpoint.keep=2", *more)


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


def kept(run_dir: Path, outcome: Outcome) -> list[str]:
    """Rows of steps 1 and 2 of the first run are still somewhere in the folder."""
    old = {row["reward/mean"] for row in json.loads((run_dir / "first.json").read_text()) if row["step"]}
    found = {row.get("reward/mean") for file in run_dir.rglob("metrics*") if file.is_file() for row in _rows(file)}
    return [] if old <= found else ["rows of metrics of the first run are gone"]


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # spoiled on purpose
    return [row for row in rows if isinstance(row, dict)]


def remember(then: Callable[[Path], object]) -> Callable[[Path], None]:
    """Writes down the rows of the first run under another name, with unlike numbers, then spoils."""

    def spoil(run_dir: Path) -> None:
        rows = looks.metrics(run_dir)
        for row in rows:
            if row["step"]:
                row["reward/mean"] = 1000.0 + row["step"]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run_dir / "first.json").write_text(json.dumps(rows))
        then(run_dir)

    return spoil


def newest(run_dir: Path, step: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


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


def both(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda run_dir: [spoil(newest(run_dir, step)) for step in (1, 2)] and None


def again_from_1(run_dir: Path, outcome: Outcome) -> list[str]:
    return [] if "step_000001" in outcome.text else ["it did not go on from the older whole checkpoint"]


def recorded(run_dir: Path, outcome: Outcome) -> list[str]:
    """The change is written down in the folder: both words in one file."""
    for file in run_dir.glob("*.json*"):
        text = file.read_text()
        if "grpo" in text and "dapo" in text:
            return []
    return ["the change of method is not recorded in the folder"]


def other_weights(place: Place) -> list[str]:
    model = place.material.copy_of("toy", place.folder / "model")
    edit_weights(model, lambda tensors: tensors.update({key: value * 1.5 for key, value in tensors.items()}))
    return [f"model.path={model}", "trainer.num_steps=3"]


def other_shape(place: Place) -> list[str]:
    return [f"model.path={place.material.model('llama')}", "model.make_vocab_divisible_by=8", "trainer.num_steps=3"]


def other_data(place: Place) -> list[str]:
    rows = (place.material.letters() / "data.jsonl").read_text().splitlines()
    file = place.folder / "other.jsonl"
    file.write_text("\n".join(reversed(rows)) + "\n")
    return [f"data.train={file}", "trainer.num_steps=3"]


def settings() -> list[Case]:
    """The same folder, other settings."""
    three = "trainer.num_steps=3"
    bf16 = ["precision=bf16", "rollout.dtype=bfloat16", "mismatch_alarm.abort_above=null", three]
    return [
        resumed("res_more", "more steps", ["trainer.num_steps=4"], Ends(("resumed from",)), steps=4),
        resumed("res_same", "the same command again", [], Ends(), steps=2),
        resumed("res_method", "another method", ["method=dapo", three], Refused(("method", r"resume\.changed"))),
        resumed("res_method_done", "another method, the run is finished", ["method=dapo"], Refused(("method", r"resume\.changed"))),
        resumed("res_method_allow", "another method, allowed", ["method=dapo", three, ALLOWED], Ends(("method",)), steps=3, look=recorded),
        resumed("res_knob", "another knob of the method", ["method.policy_loss.high=0.28", three], Refused((r"policy_loss\.high", r"resume\.changed"))),
        resumed("res_seed", "another seed", ["seed=7", three], Refused(("seed", r"resume\.changed"))),
        resumed("res_data", "other data", other_data, Refused((r"data\.train", r"resume\.changed"))),
        resumed("res_model", "a model of another shape", other_shape, Refused((r"model",))),
        resumed("res_model_weights", "other weights of the same shape", other_weights, Refused((r"model\.path", r"resume\.changed"))),
        resumed("res_precision", "another number format", bf16, Refused(("precision",))),
        resumed("res_lr", "another rate", ["optim.learning_rate=1e-4", three], Refused((r"optim\.learning_rate",), harm=False), Ends((r"optim\.learning_rate",)), steps=3),
        resumed("res_kl", "another KL weight", ["method.kl.coef=0.5", three], Refused((r"method\.kl\.coef",), harm=False), Ends((r"method\.kl\.coef",)), steps=3),
        resumed("res_batch", "another batch", ["batch.responses_per_prompt=8", three], Refused((r"batch\.responses_per_prompt",), harm=False), Ends((r"batch\.responses_per_prompt",)), steps=3),
        resumed("res_reward", "another reward", ["reward.accuracy_weight=0.5", three], Refused((r"reward\.accuracy_weight",), harm=False), Ends((r"reward\.accuracy_weight",)), steps=3),
        resumed("res_fewer", "fewer steps than are done", ["trainer.num_steps=1"], Refused((r"trainer\.num_steps",), harm=False), Ends((r"num_steps",))),
        resumed("res_logging", "settings that change nothing", ["logging.log_samples=1", "logging.tensorboard=true", three], Ends(("resumed from",)), steps=3),
    ]  # fmt: skip


def damaged() -> list[Case]:
    """Checkpoints that are not what was written."""
    three = ["trainer.num_steps=3"]
    skipped = Ends(("skip|damaged", "step_000002"), harm=True)
    afresh = (Ends(("kept|aside|moved|renamed",), harm=True), Refused(("checkpoint|metrics",)))
    return [
        resumed("res_trunc", "a cut shard", three, skipped, spoil=lambda run: cut(newest(run)), steps=3, look=again_from_1),
        resumed("res_nomanifest", "no manifest", three, skipped, spoil=lambda run: (newest(run) / "manifest.json").unlink(), steps=3, look=again_from_1),
        resumed("res_badmanifest", "a manifest that is no JSON", three, skipped, spoil=lambda run: (newest(run) / "manifest.json").write_text("{"), steps=3, look=again_from_1),
        resumed("res_flip", "4000 bytes inverted", three, skipped, spoil=lambda run: flip(newest(run)), steps=3, look=again_from_1),
        resumed("res_noextra", "a file is missing", three, skipped, spoil=lambda run: (newest(run) / "extra.pt").unlink(), steps=3, look=again_from_1),
        resumed("res_allbad", "both are cut", three, *afresh, spoil=remember(both(cut)), look=kept),
        resumed("res_allflip", "both are inverted", three, *afresh, spoil=remember(both(flip)), look=kept),
        resumed("res_nock", "metrics but no checkpoint", three, *afresh, spoil=remember(lambda run: shutil.rmtree(run / "checkpoints")), look=kept),
        resumed("res_emptyck", "an empty folder of checkpoints", three, *afresh, spoil=remember(empty_checkpoints), look=kept),
        resumed("res_pickle", "a pickle that runs code", three, Ends(("skip|damaged|trust",)), Refused(("checkpoint|pickle|trust|extra",), before="engine"), spoil=pickled, look=no_harm),
        resumed("res_partial", "what a dead writer left", three, Ends(("resumed from",)), spoil=partial, steps=3, look=no_partial),
        resumed("res_strangers", "files that are no checkpoints", three, Ends(("resumed from",)), spoil=strangers, steps=3),
    ]  # fmt: skip


def empty_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()


def partial(run_dir: Path) -> None:
    left = run_dir / "checkpoints" / "step_000007.tmp-partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(bytes(1000))


def no_partial(run_dir: Path, outcome: Outcome) -> list[str]:
    left = [path.name for path in (run_dir / "checkpoints").glob("*.tmp-*")]
    return [f"{name} of the dead run stays" for name in left]


def strangers(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "notes.txt").write_text("x")
    (run_dir / "checkpoints" / "step_best").mkdir()
    (run_dir / "requeue").write_text("2\n")


def pickled(run_dir: Path) -> None:
    """Both checkpoints hold a pickle that makes a folder when it is loaded, sealed by a manifest that fits."""
    from tests.trials.model_cases import harmful_pickle

    for step in (1, 2):
        path = newest(run_dir, step)
        for file in (path / "extra.pt", path / "common.pt"):
            file.write_bytes(harmful_pickle(run_dir / "ran"))
            reseal(path, file)


def reseal(path: Path, file: Path) -> None:
    """The manifest says of ``file`` what it is now."""
    manifest = json.loads((path / "manifest.json").read_text())
    entry = manifest["files"][file.name]
    if isinstance(entry, dict):
        from megatron_rl.runtime import digest

        manifest["files"][file.name] = {"bytes": file.stat().st_size, "xxh3": digest.file_digest(file)}
    else:
        manifest["files"][file.name] = file.stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))


def no_harm(run_dir: Path, outcome: Outcome) -> list[str]:
    return ["the pickle ran code"] if (run_dir / "ran").exists() else []


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
        resumed("res_metricsbad", "a broken line in the metrics", three, bad, Ends(("aside|kept|skipped",), harm=True), spoil=broken),
        resumed("res_metricshalf", "half a last line", three, Ends(("resumed from",)), spoil=half, steps=3),
        resumed("res_metricsgone", "no metrics, but checkpoints", three, Ends(("resumed from",)), spoil=lambda run: (run / "metrics.jsonl").unlink()),
        resumed("res_configgone", "no config.json", three, config, Ends((r"config\.json",)), spoil=lost_config),
        resumed("res_configbad", "config.json is no JSON", three, config, Ends((r"config\.json",)), spoil=lambda run: (run / "config.json").write_text("{")),
    ]  # fmt: skip


def from_path(
    name: str, title: str, target: Callable[[Path], Path], *expected: Expected, spoil: Callable[[Path], object] = lambda run: None, more: Sequence[str] = ()
) -> Case:
    """``resume=PATH`` into a new folder."""

    def play(place: Place) -> Outcome:
        source = base(place)
        spoil(source)
        words = start_words(place, place.folder / "new", "trainer.num_steps=3", f"resume={target(source)}", *more)
        outcome = place.warm(words)
        return outcome.noting(looks.trained_from(place.folder / "new", 3)) if outcome.code == 0 else outcome

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


def by_path() -> list[Case]:
    return [
        from_path("res_path_new", "a checkpoint into a new folder", newest, Ends(("resumed from",))),
        from_path("res_path_flip", "a checkpoint with inverted bytes", newest, Refused(("step_000002", "digest|damaged|written")), spoil=lambda run: flip(newest(run))),
        from_path("res_path_cut", "a cut checkpoint", newest, Refused(("step_000002",)), spoil=lambda run: cut(newest(run))),
        from_path("res_path_run", "the folder of a run", lambda run: run, Refused(("resume", "checkpoint"))),
        from_path("res_path_export", "an export", lambda run: run / "export", Refused(("resume|checkpoint", "export"))),
        from_path("res_path_file", "a file", lambda run: run / "config.json", Refused(("resume", r"config\.json"))),
        Case("res_moved", "resume", "the folder was moved", moved, (Ends(("resumed from",)),), "warm"),
        Case("res_never_used", "resume", "resume=never on a used folder", never, (Refused(("resume", "never", "run_dir")),), "warm"),
        Case("res_never_new", "resume", "resume=never on a new folder", never_new, (Ends(),), "warm"),
    ]  # fmt: skip


def cases() -> list[Case]:
    return [*settings(), *damaged(), *metrics_files(), *by_path()]
