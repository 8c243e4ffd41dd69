"""The command that shows what a model answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tests.trials.makers import finished_run
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Expected, Outcome, Refused


def sample(
    name: str, title: str, words: Callable[[Place], Sequence[object]], *expected: Expected
) -> Case:
    def play(place: Place) -> Outcome:
        return place.command([sys.executable, "-m", "megatron_rl.sample", *words(place)])

    return Case(name, "journeys", title, play, expected, "command")


def cases() -> list[Case]:
    engine = (
        "rollout.dtype=float32",
        "rollout.max_response_tokens=4",
        "rollout.max_prompt_tokens=64",
        "rollout.kv_cache_gib=0.03125",
    )
    return [
        sample(
            "jrn_sample_run", "sample from a run", lambda place: [finished_run(place)], Ends(("a",))
        ),
        sample(
            "jrn_sample_ckpt",
            "sample from a checkpoint",
            lambda place: [finished_run(place) / "checkpoints" / "step_000001"],
            Ends(),
        ),
        sample(
            "jrn_sample_hf",
            "sample from a HF directory",
            lambda place: [place.material.model("llama"), "--prompt", "1 + 1 =", *engine],
            Ends(("1 \\+ 1 =",)),
        ),
        sample(
            "jrn_sample_export",
            "sample from an export",
            lambda place: [
                finished_run(place) / "export",
                "--prompt",
                "a",
                *engine,
                "rollout.max_prompt_tokens=32",
            ],
            Ends(),
        ),
        sample(
            "jrn_sample_positions",
            "more tokens than the model has positions",
            lambda place: [finished_run(place) / "export", "--prompt", "a", *engine],
            Refused((r"max_response_tokens = 68", "64 positions"), before="", codes=(1, 2)),
        ),
        sample(
            "jrn_sample_long",
            "a prompt longer than the engine takes",
            lambda place: [place.material.model("llama"), "--prompt", "1 + " * 500, *engine],
            Refused(("max_prompt_tokens|longer",), before="", codes=(1, 2)),
        ),
    ]
