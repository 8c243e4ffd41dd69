"""What people do with it: methods, models and layouts, sweeps, samples, plug-ins, keeping the
best."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.launch import REPO
from tests.trials import looks
from tests.trials.makers import finished_run, looked_at
from tests.trials.material import plain_rows, small, toy, toy_alone, write_rows
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused


def gives_up(place: Place) -> Outcome:
    """Dynamic sampling on a task that no answer solves: the samples are there when it gives up."""
    run_dir = place.folder / "run"
    rows = [
        {"prompt": letter, "answer": "never", "data_source": "repeat", "extra": {}}
        for letter in "abcdefgh"
    ]
    data = write_rows(place.folder / "never.jsonl", rows)
    outcome = place.torchrun(toy(place.material, run_dir, f"data.train={data}", "method=dapo"))
    return outcome.noting(looks.files(run_dir, "samples.jsonl"))


def in_bfloat16(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    formats = ("precision=bf16", "rollout.dtype=bfloat16", "mismatch_limits.abort_above=null")
    words = toy(place.material, run_dir, *formats, "trainer.num_steps=3")
    return looked_at(place.torchrun(words), run_dir, 3)


def samples(place: Place) -> Outcome:
    """samples.jsonl: what was asked, of several prompts in a step."""
    run_dir = place.folder / "run"
    data = place.material.rows()
    more = ("trainer.num_steps=2", "logging.log_samples=4")
    outcome = place.train(small(place.material.model("llama"), data, run_dir, *more))
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    texts = [json.dumps(row) for row in rows if row.get("step") == 1]
    asked = [prompt["prompt"] for prompt in plain_rows(12)]
    found = {question for question in asked if any(question in text for text in texts)}
    poor = [] if found else ["no text of a prompt in samples.jsonl"]
    poor += [] if len(found) > 1 else ["the samples of a step are all of one prompt"]
    return looked_at(outcome, run_dir, 2).noting(unclear=poor)


def ended_in_time(place: Place) -> Outcome:
    """Progress: where results go, how many prompts there are."""
    run_dir = place.folder / "run"
    words = toy_alone(place.material, run_dir, "trainer.num_steps=3")
    return looked_at(place.train(words), run_dir, 3)


def sweep_words(place: Place, *more: str) -> list[str]:
    """README's sweep, on the toy."""
    words = toy(place.material, Path("unused"))
    common = [word for word in words if not word.startswith("run_dir=")]
    sweep = [sys.executable, "-m", "megatron_rl.sweep", "--nproc", "2"]
    out = ["--out", str(place.folder / "runs")]
    return [*sweep, *out, *common, "checkpoint.every_steps=1", *more]


def swept(place: Place) -> Outcome:
    outcome = place.command(sweep_words(place, "method=grpo,dr_grpo", "seed=1,2"))
    count = len(list((place.folder / "runs").glob("*/export")))
    return outcome.noting([] if count == 4 else [f"{count} of 4 runs have an export"])


def swept_again(place: Place) -> Outcome:
    """One run is unfinished; the finished ones are left alone."""
    words = sweep_words(place, "seed=1,2")
    first = place.command(words)
    if first.code != 0:
        return first
    done, unfinished = sorted((place.folder / "runs").iterdir())[:2]
    export = done / "export" / "model.safetensors"
    before = export.stat().st_mtime_ns
    shutil.rmtree(unfinished)
    outcome = place.command(words)
    wrong = [] if (unfinished / "export").is_dir() else ["the unfinished run was not finished"]
    poor = [] if export.stat().st_mtime_ns == before else ["a finished run was started again"]
    return outcome.noting(wrong, poor)


def layouts(place: Place) -> Outcome:
    """TP2, data parallel, TP2 x PP2 on four processes, the planned sync: in one folder."""
    run_dir = place.folder / "run"
    stages: list[tuple[int, Sequence[str]]] = [
        (2, ()),
        (2, ("parallel=single",)),
        (4, ("parallel=tp2_pp2",)),
        (2, ("weight_sync.method=reshard",)),
    ]
    outcome = Outcome(1, "", 0.0)
    for step, (ranks, words) in enumerate(stages, 1):
        common = (f"trainer.num_steps={step}", "checkpoint.every_steps=1")
        outcome = place.torchrun(toy(place.material, run_dir, *common, *words), ranks)
        if outcome.code != 0:
            return outcome.noting([f"stage {step} ({', '.join(words) or 'TP2'}) failed"])
    return outcome.noting(looks.trained(run_dir, 4))


def case(
    name: str,
    title: str,
    play: Callable[[Place], Outcome],
    *expected: Expected,
    how: str = "warm",
    limit_s: float = 150,
    needs: tuple[str, ...] = (),
) -> Case:
    return Case(name, "journeys", title, play, expected, how, limit_s, needs=needs)


def best(place: Place) -> Outcome:
    """The checkpoint with the best held-out score is kept although newer ones push it out."""
    run_dir = place.folder / "run"
    more = (
        "trainer.num_steps=6",
        "checkpoint.every_steps=1",
        "checkpoint.keep=1",
        "checkpoint.keep_best=true",
        "evaluation.every_steps=1",
    )
    outcome = looked_at(place.train(toy_alone(place.material, run_dir, *more)), run_dir, 6)
    if outcome.code != 0:
        return outcome
    scores = {
        row["step"]: row["eval/accuracy"]
        for row in looks.metrics(run_dir)
        if row["step"] and "eval/accuracy" in row
    }
    kept = [int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_??????")]
    top = max(scores.values())
    if any(scores.get(step) == top for step in kept):
        return outcome
    return outcome.noting([f"kept {sorted(kept)}, scores {scores}"])


def early_stop(place: Place) -> Outcome:
    """A rate that changes nothing: no evaluation is better, the run stops."""
    run_dir = place.folder / "run"
    more = (
        "trainer.num_steps=30",
        "optim.learning_rate=1e-12",
        "evaluation.every_steps=1",
        "evaluation.stop_after=3",
    )
    outcome = place.train(toy_alone(place.material, run_dir, *more))
    steps = len(looks.metrics(run_dir)) - 1
    wrong = [] if 0 < steps < 10 else [f"stopped after {steps} steps"]
    if outcome.code == 0:
        wrong += looks.finite_export(run_dir / "export")
    return outcome.noting(wrong)


def periodic(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    more = ("trainer.num_steps=4", "checkpoint.export_every_steps=2")
    outcome = looked_at(place.train(toy_alone(place.material, run_dir, *more)), run_dir, 4)
    if outcome.code != 0:
        return outcome
    return outcome.noting(looks.files(run_dir, "exports/step_000002/*.safetensors"))


def go_on_from_export(place: Place) -> Outcome:
    source = finished_run(place)
    run_dir = place.folder / "run"
    words = toy_alone(place.material, run_dir, f"model.path={source / 'export'}")
    return looked_at(place.train(words), run_dir)


def replayed(place: Place) -> Outcome:
    """A run that stops on numbers that are not finite leaves what computes the step again."""
    run_dir = place.folder / "run"
    more = (
        "optim.learning_rate=1e30",
        "trainer.num_steps=20",
        "nonfinite.stop_after=3",
        "mismatch_limits.abort_above=null",
        "weight_sync.logprob_check_every=0",
    )
    stopped = place.train(toy_alone(place.material, run_dir, *more))
    bundles = sorted((run_dir / "nonfinite").glob("*")) if (run_dir / "nonfinite").is_dir() else []
    if stopped.code == 0 or not bundles:
        return stopped.noting(["it did not stop, or left no bundle in run_dir/nonfinite"])
    return place.command([sys.executable, REPO / "tools" / "replay_step.py", bundles[0]])


def quickstart(place: Place) -> Outcome:
    """README's first command, three steps."""
    run_dir = place.folder / "run"
    script = REPO / "examples" / "quickstart_cpu" / "run.sh"
    words = [f"run_dir={run_dir}", "trainer.num_steps=3", "evaluation.num_prompts=8"]
    return looked_at(place.command(["bash", script, *words]), run_dir, 3)


def first_days() -> list[Case]:
    """The first command, number formats, what a run says and leaves."""
    return [
        case(
            "jrn_quickstart",
            "the quickstart, three steps",
            quickstart,
            Ends(),
            how="command",
            limit_s=600,
            needs=() if (REPO / ".venv").is_dir() else (".venv",),
        ),
        case(
            "jrn_dapo_gives_up",
            "dynamic sampling on a task that nothing solves",
            gives_up,
            Refused(("dynamic_sampling|groups", "samples"), before="", within_s=120),
            how="torchrun 2",
        ),
        case("jrn_bf16", "bfloat16 on processors", in_bfloat16, Ends(), how="torchrun 2"),
        case("jrn_samples", "what samples.jsonl holds", samples, Ends()),
        case(
            "jrn_progress",
            "what a run says of itself",
            ended_in_time,
            Ends((r"\b8 prompts|prompts[^\n]*\b8\b", "run_dir|/run\\b", "export")),
        ),
    ]


def sweeps_and_layouts() -> list[Case]:
    """Sweeps, and one folder with several layouts."""
    return [
        case(
            "jrn_sweep",
            "README's sweep: two methods, two seeds",
            swept,
            Ends(("combination",)),
            how="command",
            limit_s=300,
        ),
        case(
            "jrn_sweep_again",
            "a sweep that was stopped, again",
            swept_again,
            Ends(("combination",)),
            how="command",
            limit_s=240,
        ),
        case(
            "jrn_layouts",
            "four layouts in one folder",
            layouts,
            Ends(("resumed from",)),
            how="torchrun 2",
            limit_s=200,
        ),
    ]


def keeping() -> list[Case]:
    """Checkpoints and exports that are kept, and what goes on from them."""
    said = (r"finished|ends at|done",)
    return [
        case("jrn_keep_best", "the best checkpoint is kept", best, Ends()),
        case("jrn_early_stop", "early stop", early_stop, Ends(("stop",))),
        case("jrn_periodic", "an export every two steps", periodic, Ends()),
        case("jrn_from_export", "go on from an export", go_on_from_export, Ends(said)),
        case(
            "jrn_replay",
            "a step that is not finite is computed again",
            replayed,
            Ends(("nan|not finite|inf",)),
            limit_s=200,
        ),
    ]


def cases() -> list[Case]:
    return [*first_days(), *sweeps_and_layouts(), *keeping()]
