"""Generated tasks about images, each with one right answer, as EasyR1 writes its data sets: parquet
with the columns problem, answer, images ({bytes, path}) and data_source. Nothing is downloaded.

    python tools/make_vision_tasks.py --out DIR

Writes DIR/train.parquet, DIR/eval.parquet and DIR/demonstrations.parquet; no image is in two of
them. ``color``, ``count`` and ``larger`` are drawn; ``digits`` are the scanned digits of
scikit-learn, whose last fifth is kept for eval.parquet.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
}
SIDE = 56  # pixels: four patches of 14, two features


class Task(NamedTuple):
    """Example: ``Task("<image>Which color?", "red", [picture])``."""

    problem: str
    answer: str
    pictures: list[Image.Image]


def color(rng: random.Random) -> Task:
    """One figure in one of four colors, on a gray that varies."""
    name = rng.choice(list(COLORS))
    picture = Image.new("RGB", rng.choice([(SIDE, SIDE), (84, SIDE)]), gray(rng))
    side = rng.randint(18, 34)
    left = rng.randint(0, picture.width - side)
    top = rng.randint(0, picture.height - side)
    box = (left, top, left + side, top + side)
    draw = ImageDraw.Draw(picture)
    figure = rng.choice([draw.ellipse, draw.rectangle])
    figure(box, fill=COLORS[name])
    return Task("<image>Which color is the figure?", name, [picture])


def count(rng: random.Random) -> Task:
    """One to four dots, each in a cell of its own of a 2 x 2 grid."""
    cells = rng.sample([(0, 0), (0, 1), (1, 0), (1, 1)], rng.randint(1, 4))
    picture = Image.new("RGB", (SIDE, SIDE), gray(rng))
    draw = ImageDraw.Draw(picture)
    for row, column in cells:
        left = 28 * column + rng.randint(2, 8)
        top = 28 * row + rng.randint(2, 8)
        draw.ellipse((left, top, left + 16, top + 16), fill=(20, 20, 20))
    return Task("<image>How many dots are there?", str(len(cells)), [picture])


def larger(rng: random.Random) -> Task:
    """Two images of a disc each; one is clearly larger."""
    sides = rng.sample([12, 22, 32, 42], 2)
    pictures = []
    for side in sides:
        picture = Image.new("RGB", (SIDE, SIDE), gray(rng))
        left = rng.randint(2, SIDE - side - 2)
        top = rng.randint(2, SIDE - side - 2)
        ImageDraw.Draw(picture).ellipse((left, top, left + side, top + side), fill=(60, 60, 160))
        pictures.append(picture)
    answer = "first" if sides[0] > sides[1] else "second"
    return Task("<image><image>Which disc is larger, the first or the second?", answer, pictures)


def digits(held_out: bool) -> Callable[[random.Random], Task]:
    """A scanned digit of 8 x 8 pixels, seven times enlarged."""
    scans = load_digits()
    last = len(scans.target) * 4 // 5
    rows = range(last, len(scans.target)) if held_out else range(last)

    def task(rng: random.Random) -> Task:
        row = rng.choice(rows)
        pixels = (scans.images[row] * 255 / 16).astype("uint8")
        picture = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        return Task("<image>Which digit is this?", str(scans.target[row]), [picture])

    return task


def gray(rng: random.Random) -> tuple[int, int, int]:
    level = rng.randint(190, 255)
    return level, level, level


def tasks(num_rows: int, seed: int, seen: set[bytes], *, held_out: bool) -> list[dict[str, Any]]:
    """``num_rows`` rows, the kinds in turn, none with all of its images in ``seen``; adds its own
    to it."""
    kinds = {"color": color, "count": count, "larger": larger, "digits": digits(held_out)}
    rng = random.Random(seed)
    new: set[bytes] = set()
    rows: list[dict[str, Any]] = []
    while len(rows) < num_rows:
        source = list(kinds)[len(rows) % len(kinds)]
        task = kinds[source](rng)
        files = [png(picture) for picture in task.pictures]
        # A digit may come again in one file, and the scans are split by their number.
        if b"".join(files) in seen:
            continue
        new.add(b"".join(files))
        rows.append(
            {
                "problem": task.problem,
                "answer": task.answer,
                "images": [{"bytes": content, "path": None} for content in files],
                "data_source": source,
            }
        )
    if held_out:
        seen |= new
    return rows


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=2000, help="rows of train and demonstrations")
    parser.add_argument("--eval", type=int, default=256, help="rows of eval")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    for number, name in enumerate(("eval", "train", "demonstrations")):
        held_out = name == "eval"
        num_rows = options.eval if held_out else options.train
        rows = tasks(num_rows, options.seed * 3 + number, seen, held_out=held_out)
        pq.write_table(pa.Table.from_pylist(rows), options.out / f"{name}.parquet")


if __name__ == "__main__":
    main()
