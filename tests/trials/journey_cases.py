"""What people do with it: number formats, layouts, samples, code of their own, keeping the best.

The first commands and sweeps, as the documents print them, are run by tests/test_commands.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

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


METHOD = """
name: mine
estimator: {name: zscore}
policy_loss: {name: ppo_clip}
aggregate: {name: token_mean}
kl: {coef: 0.0}
"""


def own_method(place: Place) -> Outcome:
    """A method in a folder of the user's."""
    folder = place.folder / "conf" / "method"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(METHOD)
    words = ("--config-dir", str(folder.parent), "method=mine")
    run_dir = place.folder / "run"
    return looked_at(place.train(toy_alone(place.material, run_dir, *words)), run_dir)


def no_judge(place: Place) -> Outcome:
    """A reward function that always raises."""
    file = place.folder / "mine.py"
    file.write_text("def f(tasks, responses):\n    raise RuntimeError('no judge')\n")
    words = ("reward.verifier=auto", "reward.answer_pattern=null", "trainer.num_steps=5")
    run_dir = place.folder / "run"
    function = f"reward.function={file}:f"
    return looked_at(place.train(toy_alone(place.material, run_dir, *words, function)), run_dir)


def cases() -> list[Case]:
    given_up = Refused(("dynamic_sampling|groups", "samples"), before="", within_s=120)
    progress = Ends((r"\b8 prompts|prompts[^\n]*\b8\b", "run_dir|/run\\b", "export"))
    judged = (
        Refused((r"reward\.function", "no judge"), before="", within_s=90),
        Ends(("no judge",)),
    )
    resumed = Ends(("resumed from",))
    both = "torchrun 2"
    return [
        case("jrn_dapo_gives_up", "a task that nothing solves", gives_up, given_up, how=both),
        case("jrn_bf16", "bfloat16 on processors", in_bfloat16, Ends(), how=both),
        case("jrn_samples", "what samples.jsonl holds", samples, Ends()),
        case("jrn_progress", "what a run says of itself", ended_in_time, progress),
        case("jrn_layouts", "four in one folder", layouts, resumed, how=both, limit_s=200),
        case("jrn_config_dir", "a method from --config-dir", own_method, Ends()),
        case("jrn_reward_raises", "a reward that always raises", no_judge, *judged),
        case("jrn_keep_best", "the best checkpoint is kept", best, Ends()),
        case("jrn_early_stop", "early stop", early_stop, Ends(("stop",))),
        case("jrn_periodic", "an export every two steps", periodic, Ends()),
        case(
            "jrn_from_export", "from an export", go_on_from_export, Ends(("finished|ends at|done",))
        ),
    ]
