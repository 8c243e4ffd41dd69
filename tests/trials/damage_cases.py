"""Checkpoints that are cut, inverted, incomplete or hostile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trials import looks
from tests.trials.place import Case
from tests.trials.resume_cases import cut, flip, newest, resumed
from tests.trials.verdicts import Ends, Outcome, Refused


def both(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda run_dir: [spoil(newest(run_dir, step)) for step in (1, 2)] and None


def again_from_1(run_dir: Path, outcome: Outcome) -> list[str]:
    if "step_000001" in outcome.text:
        return []
    return ["it did not go on from the older whole checkpoint"]


def kept(run_dir: Path, outcome: Outcome) -> list[str]:
    """Rows of steps 1 and 2 of the first run are still somewhere in the folder."""
    first = json.loads((run_dir / "first.json").read_text())
    old = {row["reward/mean"] for row in first if row["step"]}
    files = [file for file in run_dir.rglob("metrics*") if file.is_file()]
    now = {row.get("reward/mean") for file in files for row in _rows(file)}
    return [] if old <= now else ["rows of metrics of the first run are gone"]


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # spoiled on purpose
    return [row for row in rows if isinstance(row, dict)]


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


def skipped() -> list[Case]:
    """The newest checkpoint is damaged: the run goes on from the one before."""
    three = ["trainer.num_steps=3"]
    older = Ends(("skip|damaged", "step_000002"), harm=True)
    return [
        resumed(
            "res_trunc",
            "a cut shard",
            three,
            older,
            spoil=lambda run: cut(newest(run)),
            steps=3,
            look=again_from_1,
        ),
        resumed(
            "res_nomanifest",
            "no manifest",
            three,
            older,
            spoil=lambda run: (newest(run) / "manifest.json").unlink(),
            steps=3,
            look=again_from_1,
        ),
        resumed(
            "res_badmanifest",
            "a manifest that is no JSON",
            three,
            older,
            spoil=lambda run: (newest(run) / "manifest.json").write_text("{"),
            steps=3,
            look=again_from_1,
        ),
        resumed(
            "res_flip",
            "4000 bytes inverted",
            three,
            older,
            spoil=lambda run: flip(newest(run)),
            steps=3,
            look=again_from_1,
        ),
        resumed(
            "res_noextra",
            "a file is missing",
            three,
            older,
            spoil=lambda run: (newest(run) / "extra.pt").unlink(),
            steps=3,
            look=again_from_1,
        ),
    ]


def nothing_left() -> list[Case]:
    """No checkpoint is left: the rows of the first run are kept."""
    three = ["trainer.num_steps=3"]
    afresh = (Ends(("kept|aside|moved|renamed",), harm=True), Refused(("checkpoint|metrics",)))
    return [
        resumed("res_allbad", "both are cut", three, *afresh, spoil=remember(both(cut)), look=kept),
        resumed(
            "res_allflip",
            "both are inverted",
            three,
            *afresh,
            spoil=remember(both(flip)),
            look=kept,
        ),
        resumed(
            "res_nock",
            "metrics but no checkpoint",
            three,
            *afresh,
            spoil=remember(lambda run: shutil.rmtree(run / "checkpoints")),
            look=kept,
        ),
        resumed(
            "res_emptyck",
            "an empty folder of checkpoints",
            three,
            *afresh,
            spoil=remember(empty_checkpoints),
            look=kept,
        ),
    ]


def strange() -> list[Case]:
    """Hostile checkpoints, and what does not belong."""
    three = ["trainer.num_steps=3"]
    return [
        resumed(
            "res_pickle",
            "a pickle that runs code",
            three,
            Ends(("skip|damaged|trust",)),
            Refused(("checkpoint|pickle|trust|extra",), before="engine"),
            spoil=pickled,
            look=no_harm,
        ),
        resumed(
            "res_partial",
            "what a dead writer left",
            three,
            Ends(("resumed from",)),
            spoil=partial,
            steps=3,
            look=no_partial,
        ),
        resumed(
            "res_strangers",
            "files that are no checkpoints",
            three,
            Ends(("resumed from",)),
            spoil=strangers,
            steps=3,
        ),
    ]


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
    """Both checkpoints hold a pickle that makes a folder when loaded; the manifest fits."""
    from tests.trials.tensor_cases import harmful_pickle

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

        sealed = {"bytes": file.stat().st_size, "xxh3": digest.file_digest(file)}
        manifest["files"][file.name] = sealed
    else:
        manifest["files"][file.name] = file.stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))


def no_harm(run_dir: Path, outcome: Outcome) -> list[str]:
    return ["the pickle ran code"] if (run_dir / "ran").exists() else []


def cases() -> list[Case]:
    return [*skipped(), *nothing_left(), *strange()]
