"""Going on: the same command again, from whole, damaged and foreign folders.

What is refused before anything is built is tested without a launch: other settings, fewer steps,
broken rows and checkpoints that are none (tests/unit/trainer, tests/e2e/test_resume.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.trials import looks
from tests.trials.material import edit_json, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused

STEPS = 2
ALLOWED = "resume.changed=allow"
RESUMED = Ends(("resumed from",))


def start_words(place: Place, run_dir: Path, *more: str) -> list[str]:
    """Two steps with a checkpoint each, of which both are kept."""
    saved = ("checkpoint.every_steps=1", "checkpoint.keep=2")
    return toy_alone(place.material, run_dir, f"trainer.num_steps={STEPS}", *saved, *more)


def base(place: Place) -> Path:
    """A finished run of two steps in ``place.folder/run``, a copy of one that was made once."""

    def train(path: Path) -> None:
        outcome = place.train(start_words(place, path))
        assert outcome.code == 0, f"the first run failed: {outcome.text[-1500:]}"

    source = place.material.made("runs/base", train)
    run_dir = Path(shutil.copytree(source, place.folder / "run"))
    edit_json(run_dir / "config.json", run_dir=str(run_dir))
    return run_dir


def resumed(
    name: str,
    title: str,
    *expected: Expected,
    more: Sequence[str] = (),
    spoil: Callable[[Path], object] = lambda run_dir: None,
    look: Callable[[Path, Outcome], Sequence[str]] = lambda run_dir, outcome: (),
    steps: int | None = 3,
) -> Case:
    """The base run is spoiled, then started again for one step more. ``steps``: what
    ``metrics.jsonl`` must hold when the second command ends well; ``look`` finds what is wrong."""

    def play(place: Place) -> Outcome:
        run_dir = base(place)
        spoil(run_dir)
        outcome = place.train(start_words(place, run_dir, "trainer.num_steps=3", *more))
        if outcome.code == 0 and steps is not None:
            outcome = outcome.noting(looks.trained(run_dir, steps))
        return outcome if outcome.code is None else outcome.noting(look(run_dir, outcome))

    return Case(name, "resume", title, play, expected, "warm")


def newest(run_dir: Path, step: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def recorded(run_dir: Path, outcome: Outcome) -> list[str]:
    """The change is written down in the folder: both words in one file."""
    texts = [file.read_text() for file in run_dir.glob("*.json*")]
    if any("grpo" in text and "dapo" in text for text in texts):
        return []
    return ["the change of method is not recorded in the folder"]


def half_a_row(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')


def elsewhere(name: str, title: str, start: Callable[[Place], tuple[Path, str]]) -> Case:
    """``start`` gives the folder of the third step, and one more override."""

    def play(place: Place) -> Outcome:
        run_dir, word = start(place)
        outcome = place.train(start_words(place, run_dir, "trainer.num_steps=3", word))
        return outcome.noting(looks.trained_from(run_dir, 3)) if outcome.code == 0 else outcome

    return Case(name, "resume", title, play, (RESUMED,), "warm")


def into_new(place: Place) -> tuple[Path, str]:
    return place.folder / "new", f"resume={newest(base(place))}"


def moved(place: Place) -> tuple[Path, str]:
    return base(place).rename(place.folder / "elsewhere"), "resume=auto"


def going_on() -> list[Case]:
    return [
        resumed("res_more", "more steps", RESUMED, more=["trainer.num_steps=4"], steps=4),
        resumed("res_same", "the same again", Ends(), more=["trainer.num_steps=2"], steps=2),
        resumed(
            "res_method_allow",
            "another method, allowed",
            Ends(("method",)),
            more=["method=dapo", ALLOWED],
            look=recorded,
        ),
        resumed("res_metricshalf", "half a last line", RESUMED, spoil=half_a_row),
        resumed(
            "res_metricsgone",
            "no metrics, but checkpoints",
            RESUMED,
            spoil=lambda run: (run / "metrics.jsonl").unlink(),
            steps=None,
        ),
        elsewhere("res_path_new", "a checkpoint into a new folder", into_new),
        elsewhere("res_moved", "the folder was moved", moved),
    ]


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
    if "step_000001" in outcome.text:
        return []
    return ["it did not go on from the older whole checkpoint"]


def skipped() -> list[Case]:
    """The newest checkpoint is damaged: the run goes on from the one before."""
    damages: dict[str, tuple[str, Callable[[Path], object]]] = {
        "res_trunc": ("a cut shard", cut),
        "res_nomanifest": ("no manifest", lambda path: (path / "manifest.json").unlink()),
        "res_badmanifest": ("no JSON", lambda path: (path / "manifest.json").write_text("{")),
        "res_flip": ("4000 bytes inverted", flip),
        "res_noextra": ("a file is missing", lambda path: (path / "extra.pt").unlink()),
    }
    older = Ends(("skip|damaged", "step_000002"), harm=True)
    return [
        resumed(
            name,
            title,
            older,
            spoil=lambda run, damage=damage: damage(newest(run)),
            look=again_from_1,
        )
        for name, (title, damage) in damages.items()
    ]


def kept(run_dir: Path, outcome: Outcome) -> list[str]:
    """Rows of steps 1 and 2 of the first run are still somewhere in the folder."""
    first = json.loads((run_dir / "first.json").read_text())
    old = {row["reward/mean"] for row in first if row["step"]}
    files = [file for file in run_dir.rglob("metrics*") if file.is_file()]
    now = {row.get("reward/mean") for file in files for row in _rows(file)}
    return [] if old <= now else ["rows of metrics of the first run are gone"]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def remember(then: Callable[[Path], object]) -> Callable[[Path], None]:
    """Keeps the rows of the first run under another name, with unlike numbers, then spoils."""

    def spoil(run_dir: Path) -> None:
        rows = looks.metrics(run_dir)
        for row in rows:
            if row["step"]:
                row["reward/mean"] = 1000.0 + row["step"]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run_dir / "first.json").write_text(json.dumps(rows))
        then(run_dir)

    return spoil


def empty_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()


def nothing_left() -> list[Case]:
    """No checkpoint is left: the rows of the first run are kept."""
    afresh = (Ends(("kept|aside|moved|renamed",), harm=True), Refused(("checkpoint|metrics",)))
    losses: dict[str, tuple[str, Callable[[Path], object]]] = {
        "res_allbad": ("both are cut", both(cut)),
        "res_allflip": ("both are inverted", both(flip)),
        "res_nock": ("no checkpoints", lambda run: shutil.rmtree(run / "checkpoints")),
        "res_emptyck": ("an empty folder of checkpoints", empty_checkpoints),
    }
    return [
        resumed(name, title, *afresh, spoil=remember(loss), look=kept, steps=None)
        for name, (title, loss) in losses.items()
    ]


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
    """Both checkpoints hold a pickle that makes a folder when loaded; the manifest fits."""
    from megatron_rl.runtime import digest
    from tests.refusals.inputs import harmful_pickle

    for step in (1, 2):
        path = newest(run_dir, step)
        manifest = json.loads((path / "manifest.json").read_text())
        for file in (path / "extra.pt", path / "common.pt"):
            file.write_bytes(harmful_pickle(run_dir / "ran"))
            sealed = {"bytes": file.stat().st_size, "xxh3": digest.file_digest(file)}
            manifest["files"][file.name] = sealed
        (path / "manifest.json").write_text(json.dumps(manifest))


def no_harm(run_dir: Path, outcome: Outcome) -> list[str]:
    return ["the pickle ran code"] if (run_dir / "ran").exists() else []


def strange() -> list[Case]:
    """Hostile checkpoints, and what does not belong."""
    return [
        resumed(
            "res_pickle",
            "a pickle that runs code",
            Ends(("skip|damaged|trust",)),
            Refused(("checkpoint|pickle|trust|extra",), before="engine"),
            spoil=pickled,
            look=no_harm,
            steps=None,
        ),
        resumed("res_partial", "what a dead writer left", RESUMED, spoil=partial, look=no_partial),
        resumed("res_strangers", "files that are no checkpoints", RESUMED, spoil=strangers),
    ]


def cases() -> list[Case]:
    return [*going_on(), *skipped(), *nothing_left(), *strange()]
