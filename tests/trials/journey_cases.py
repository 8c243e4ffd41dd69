"""What no other test starts with both engines: bfloat16, several layouts in one folder, experts.

The first commands, sweeps and tools, as the documents print them, are run by
tests/test_commands.py; resumed runs by tests/e2e/test_resume.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.trials import looks
from tests.trials.looks import looked_at
from tests.trials.material import small, toy, write_rows
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome

FILES = (
    "metrics.jsonl",
    "config.json",
    "curves.png",
    "samples.jsonl",
    "export/*.safetensors",
    "tensorboard/*",
)
GSM = (
    "data.columns.prompt=question",
    "data.answer_after='####'",
    "reward.verifier=number",
    "logging.trackers=[tensorboard]",
)


def in_bfloat16(place: Place) -> Outcome:
    run_dir = place.folder / "run"
    formats = ("precision=bf16", "rollout.dtype=bfloat16", "mismatch_limits.abort_above=null")
    words = toy(place.material, run_dir, *formats, "trainer.num_steps=3")
    return looked_at(place.torchrun(words), run_dir, 3)


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


def experts(place: Place) -> Outcome:
    """Mixtral on two expert ranks, on a file in the form of GSM8K; ``transformers`` loads what
    comes out. All methods: tests/e2e/test_methods.py."""
    run_dir = place.folder / "run"
    rows = [{"question": f"{n} and one?", "answer": f"we add.\n#### {n + 1}"} for n in range(12)]
    data = write_rows(place.folder / "gsm.jsonl", rows)
    more = (*GSM, "trainer.num_steps=3", "parallel.expert=2", "method=dapo")
    plain = "method.filters.dynamic_sampling=null"
    words = small(place.material.model("mixtral"), data, run_dir, *more, plain)
    outcome = looked_at(place.torchrun(words), run_dir, 3)
    if outcome.code != 0:
        return outcome
    missing = looks.files(run_dir, *FILES)
    return outcome.noting([*missing, *looks.generates(run_dir / "export")])


def cases() -> list[Case]:
    plays = {
        "jrn_bf16": ("bfloat16 on processors", in_bfloat16, Ends()),
        "jrn_layouts": ("four in one folder", layouts, Ends(("resumed from",))),
        "jrn_dapo_plain": ("dapo, two expert ranks", experts, Ends()),
    }
    return [
        Case(name, "journeys", title, play, (expected,), "torchrun 2", limit_s=200)
        for name, (title, play, expected) in plays.items()
    ]
