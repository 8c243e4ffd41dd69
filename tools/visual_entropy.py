"""Visual entropy of images under a vision encoder, for methods with a perceptual part (durian,
durian_perceptual).

    python tools/visual_entropy.py ENCODER --cache scores.parquet IMAGE...
    python tools/visual_entropy.py ENCODER --cache scores.parquet --data train.jsonl \\
        --images-column images --out scored.jsonl

ENCODER is a Hugging Face directory of a vision encoder (config.json, weights,
preprocessor_config.json), or of a whole vision-language model, whose tower is then taken. Scores
are kept in the cache, one row for each pair of image bytes and encoder, so that a second run reads
them. With --data every row gets extra.visual_entropy, in nats: the mean over its images, which are
paths, relative to that file, or {bytes, path}. A run with images computes its own for rows that
have none (megatron_rl/signals/visual_entropy.py).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.data.rows import Rows, read_rows
from megatron_rl.signals.visual_entropy import visual_entropy

SCHEMA = pa.schema(
    [("image", pa.string()), ("encoder", pa.string()), ("entropy_nats", pa.float64())]
)


class Encoder:
    """A frozen vision encoder: image -> patch features [patches, width], without class or register
    tokens."""

    def __init__(self, path: Path) -> None:
        for name in ("config.json", "preprocessor_config.json"):
            if not (path / name).is_file():
                raise ValueError(
                    f"ENCODER {path}: no {name} there; give a Hugging Face directory of a vision"
                    " encoder"
                )
        model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        self.model = getattr(model, "visual", model)  # the tower of a vision-language model
        self.processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        digest = xxhash.xxh3_128(
            (path / "config.json").read_bytes() + (path / "preprocessor_config.json").read_bytes()
        )
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    @torch.no_grad()
    def features(self, image: Image.Image) -> Tensor:
        inputs = self.processor(images=[image.convert("RGB")], return_tensors="pt")
        if "image_grid_thw" in inputs:  # the Qwen family takes patches, of any number
            return self.model(
                inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]
            ).last_hidden_state
        hidden = self.model(pixel_values=inputs["pixel_values"]).last_hidden_state[0]
        height, width = inputs["pixel_values"].shape[-2:]
        num_patches = math.prod(side // self.model.config.patch_size for side in (height, width))
        return hidden[hidden.shape[0] - num_patches :]


class Scores:
    """Entropies by (image bytes, encoder), kept in a parquet file."""

    def __init__(self, path: Path, encoder: Encoder) -> None:
        self.path, self.encoder = path, encoder
        self.rows = pq.read_table(path, schema=SCHEMA).to_pylist() if path.exists() else []
        self.known = {
            row["image"]: row["entropy_nats"]
            for row in self.rows
            if row["encoder"] == encoder.fingerprint
        }
        self.computed = 0

    def of(self, source: Path | bytes) -> float:
        """``source``: an image file, or what is in it."""
        content = source if isinstance(source, bytes) else source.read_bytes()
        key = xxhash.xxh3_128_hexdigest(content)
        if key not in self.known:
            with Image.open(io.BytesIO(content)) as image:
                self.known[key] = visual_entropy(self.encoder.features(image)).item()
            self.rows.append(
                {"image": key, "encoder": self.encoder.fingerprint, "entropy_nats": self.known[key]}
            )
            self.computed += 1
        return self.known[key]

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(self.rows, schema=SCHEMA), partial)
        partial.replace(self.path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )


def scored(rows: Rows, folder: Path, column: str, scores: Scores) -> list[dict[str, Any]]:
    """The rows with extra.visual_entropy.

    Raises:
        ValueError: a row without images.
    """
    result = []
    for number, row in rows:
        images = row.get(column)
        if isinstance(images, str | Mapping):
            images = [images]
        if not images:
            raise ValueError(
                f"row {number}: column {column!r} holds no image path; choose the column with"
                " --images-column"
            )
        values = [scores.of(source_of(image, folder)) for image in images]
        extra = {**(row.get("extra") or {}), "visual_entropy": fmean(values)}
        result.append({**row, "extra": extra})
    return result


def source_of(image: str | Mapping[str, Any], folder: Path) -> Path | bytes:
    """A path, or {bytes, path} as data sets have it."""
    if isinstance(image, Mapping):
        return image["bytes"] if image.get("bytes") is not None else folder / image["path"]
    return folder / image


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("images", type=Path, nargs="*")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a .jsonl or .parquet file")
    parser.add_argument("--images-column", default="images")
    parser.add_argument("--out", type=Path, help="where the scored copy of --data goes")
    options = parser.parse_intermixed_args(arguments)
    if (options.data is None) != (options.out is None):
        parser.error("--data and --out go together")
    try:
        score(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def score(options: argparse.Namespace) -> None:
    """Does what the command line asks.

    Raises:
        ValueError: no encoder there, a damaged data file, a row without images.
        OSError: a file that is missing, or no image.
    """
    scores = Scores(options.cache, Encoder(options.encoder))
    for image in options.images:
        print(f"{scores.of(image):.6f} {image}")
    if options.data:
        write_rows(
            options.out,
            scored(read_rows(options.data), options.data.parent, options.images_column, scores),
        )
    scores.save()
    print(
        f"{scores.computed} computed, {len(scores.known) - scores.computed} in the cache",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
