"""Many starts that meet an error of the user's, with 2 to 8 ranks on a loaded machine: each must
end with exactly one message, whole and of at most 15 lines, whether all ranks meet the error or one
alone.

    python -m tests.trials.starts [--count 100] [--seed 1] [--idle] [--ranks 2,4,8]
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.trials.kills import folder_of, options_of, place_of
from tests.trials.material import Material, edit_weights, toy, write_rows
from tests.trials.place import torchrun
from tests.trials.verdicts import Outcome, Refused, Verdict, judge

LIMIT_S = 400.0
RANKS = (2, 3, 4, 6, 8)
LAYER = "model.layers.1.mlp.down_proj.weight"  # of the last stage, whatever the pipeline


@dataclass(frozen=True)
class Mistake:
    """An error of the user's: the overrides that make it, what its message must say, on how many
    ranks."""

    name: str
    change: Callable[[Material], list[str]]
    says: tuple[str, ...]
    ranks: tuple[int, ...] = RANKS


def narrow(material: Material) -> Path:
    """The toy with a matrix of another shape in its last layer."""

    def write(path: Path) -> None:
        material.copy_of("toy", path)
        edit_weights(
            path, lambda tensors: tensors.update({LAYER: tensors[LAYER][:, :-8].contiguous()})
        )

    return material.made("narrow", write)


def broken(material: Material) -> Path:
    rows = [
        '{"prompt": "a", "answer": "a", "data_source": "x", "extra": {}}',
        '{"prompt": "b", "ans',
    ]
    return material.made("broken.jsonl", lambda path: write_rows(path, rows))


ALONE = ["parallel=single", "rollout.tensor=1", "batch.prompts_per_step=8"]
MISTAKES = (
    Mistake(
        "typo of a key", lambda _: [*ALONE, "optim.learning_rat=1"], (r"optim\.learning_rate",)
    ),
    Mistake(
        "no such model",
        lambda _: [*ALONE, "model.path=/nowhere/model"],
        (r"model\.path", "/nowhere/model"),
    ),
    Mistake(
        "broken data",
        lambda material: [*ALONE, f"data.train={broken(material)}"],
        (r"broken\.jsonl", r"\b2\b"),
    ),
    Mistake(
        "wrong sizes",
        lambda _: ["batch.prompts_per_minibatch=3", "parallel.tensor=16"],
        (r"prompts_per_minibatch", "16"),
    ),
    Mistake(
        "wrong types",
        lambda _: [*ALONE, "seed=one", "trainer.num_steps=1.5"],
        ("seed", r"num_steps"),
    ),
    Mistake(
        "a wrong shape in the last stage",
        lambda material: ["parallel=pp2", "rollout.tensor=1", f"model.path={narrow(material)}"],
        ("down_proj", "88|96"),
        (2, 4, 8),
    ),
)


@dataclass(frozen=True)
class Start:
    """One start and its verdict."""

    number: int
    mistake: str
    ranks: int
    verdict: Verdict
    seconds: float

    def line(self) -> str:
        reasons = "; ".join(self.verdict.reasons)
        return (
            f"{self.number:3}  {self.verdict.name:5} {self.seconds:6.1f} s  {self.ranks} ranks "
            f" {self.mistake:32} {reasons}"
        )


def started(
    material: Material, folder: Path, mistake: Mistake, ranks: int
) -> tuple[Verdict, Outcome]:
    """One start of ``ranks`` processes."""
    place = place_of(material, folder)
    words = toy(material, folder / "run", *mistake.change(material))
    outcome = place.command(torchrun(ranks, words), limit_s=LIMIT_S)
    return judge([Refused(mistake.says, before="", within_s=LIMIT_S)], outcome), outcome


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def campaign(
    count: int, seed: int, folder: Path, busy: int, ranks: Sequence[int] = RANKS
) -> list[Start]:
    """``count`` starts: the mistakes in turn, the number of ranks drawn; small numbers more
    often."""
    material = Material(folder / "shared")
    material.letters()
    draw = random.Random(seed)
    found = []
    with load(busy):
        for number in range(1, count + 1):
            mistake = MISTAKES[(number - 1) % len(MISTAKES)]
            sizes = [size for size in mistake.ranks if size in ranks] or [mistake.ranks[0]]
            size = draw.choices(sizes, weights=[1 / size for size in sizes])[0]
            verdict, outcome = started(material, folder / f"start_{number}", mistake, size)
            start = Start(number, mistake.name, size, verdict, outcome.seconds)
            print(start.line(), flush=True)
            found.append(start)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = options_of("starts", __doc__, 100)
    idle = "without processes that load the machine"
    parser.add_argument("--idle", action="store_true", help=idle)
    numbers = ",".join(map(str, RANKS))
    parser.add_argument("--ranks", default=numbers, help="numbers of ranks to draw from")
    options = parser.parse_args(argv)
    busy = 0 if options.idle else os.cpu_count() or 1
    sizes = [int(size) for size in options.ranks.split(",")]
    with folder_of(options) as folder:
        found = campaign(options.count, options.seed, folder, busy, sizes)
    good = sum(start.verdict.name == "good" for start in found)
    lost = sum(any("no message" in reason for reason in start.verdict.reasons) for start in found)
    print(f"{good} of {len(found)} starts end with their one message; lost: {lost}")
    return int(good < len(found))


if __name__ == "__main__":
    sys.exit(main())
