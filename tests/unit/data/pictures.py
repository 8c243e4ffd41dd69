"""Images of noise, as files and as images of a prompt; the directory of a vision-language model."""

from __future__ import annotations

import argparse
import hashlib
import io
from pathlib import Path

import numpy as np
import PIL.Image

from megatron_rl.types import Image
from tools.make_toy_vision_model import write_untrained

QUESTION = "What is it?"


def seeing_model(path: Path, seed: int = 0) -> Path:
    """A Qwen2.5-VL of one layer; patches of 14, merges of 2."""
    options = argparse.Namespace(seed=seed, layers=1, hidden=64, tower_hidden=32)
    write_untrained(path, [QUESTION], options)
    return path


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image(width: int, height: int, seed: int = 0) -> Image:
    content = png(width, height, seed)
    return Image(hashlib.sha256(content).hexdigest(), width, height, content)
