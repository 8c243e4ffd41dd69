"""Methods on small models: three steps on two ranks, and what they leave."""

from __future__ import annotations

from pathlib import Path

from tests.trials import looks
from tests.trials.makers import looked_at
from tests.trials.material import small, write_rows
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


def gsm_rows(path: Path) -> Path:
    """A file of the user's own in the form of GSM8K."""
    rows = [{"question": f"{n} and one?", "answer": f"we add.\n#### {n + 1}"} for n in range(12)]
    return write_rows(path, rows)


GSM = (
    "data.columns.prompt=question",
    "data.answer_after='####'",
    "reward.verifier=number",
    "logging.tensorboard=true",
)


def method_case(name: str, title: str, family: str, *words: str, expert: int = 1) -> Case:
    """Three steps of a method on two ranks; ``transformers`` loads what comes out."""

    def play(place: Place) -> Outcome:
        run_dir = place.folder / "run"
        data = gsm_rows(place.folder / "gsm.jsonl")
        more = (*GSM, "trainer.num_steps=3", f"parallel.expert={expert}", *words)
        overrides = small(place.material.model(family), data, run_dir, *more)
        outcome = looked_at(place.torchrun(overrides), run_dir, 3)
        if outcome.code != 0:
            return outcome
        missing = looks.files(run_dir, *FILES)
        return outcome.noting([*missing, *looks.generates(run_dir / "export")])

    return Case(name, "journeys", title, play, (Ends(),), "torchrun 2", limit_s=150)


def cases() -> list[Case]:
    """A method for each kind of model; all methods: tests/e2e/test_methods.py."""
    plain = ("method=dapo", "method.filters.dynamic_sampling=null")
    text = ("method=durian", "method.estimator.perceptual=0")
    return [
        method_case("jrn_a_grae", "a_grae on Llama", "llama", "method=a_grae"),
        method_case("jrn_durian", "durian on text", "qwen2", *text),
        method_case("jrn_dapo_plain", "dapo, two expert ranks", "mixtral", *plain, expert=2),
    ]
