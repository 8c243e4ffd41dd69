"""Images of prompts as a vision tower takes them: sizes from headers, pixels on demand."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoImageProcessor
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from megatron_rl.config.model_config import read_json
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.multimodal.masks import MaskedImage
from megatron_rl.errors import concerning
from megatron_rl.runtime.memory import GIB, available_gib
from megatron_rl.types import Image

_FILE = "preprocessor_config.json"
_KEPT_SHARE = 1 / 32  # of the free host memory; a node has up to eight ranks


class VisionProcessor:
    """Images as the tower of a model directory takes them; the Qwen-VL families.

    An image becomes a grid of ``patch_size`` x ``patch_size`` pixels after it was resized to
    multiples of ``patch_size * merge_size``, with ``size_limits`` on its area. ``merge_size`` x
    ``merge_size`` patches give one feature, which takes the place of one image token.

    Example, patches of 14 and merges of 2: an image of 84 x 56 pixels has the grid (1, 4, 6): 4
    rows and 6 columns of patches, 6 tokens.
    """

    def __init__(
        self, model_path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """``min_pixels``, ``max_pixels``: of an image after resizing; None: as the directory says.

        Raises:
            ValueError: the directory has no image processor of these families, or the limits
                contradict each other.
        """
        folder = Path(model_path)
        self._processor: Any = _load(folder)
        size = self._processor.size
        self.size_limits: Mapping[str, int] = {
            "shortest_edge": min_pixels or size["shortest_edge"],
            "longest_edge": max_pixels or size["longest_edge"],
        }
        if self.size_limits["shortest_edge"] > self.size_limits["longest_edge"]:
            raise ValueError(
                f"data.min_pixels = {self.size_limits['shortest_edge']} is above data.max_pixels ="
                f" {self.size_limits['longest_edge']}, where {folder / _FILE} fills in what is"
                " null; lower the one or raise the other"
            )
        self.patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size
        config = read_json(folder / "config.json")
        self.image_token_id: int = config["image_token_id"]
        # What stands around the image tokens; a chat template writes all three.
        self.place_ids: tuple[int, int, int] = (
            config["vision_start_token_id"],
            self.image_token_id,
            config["vision_end_token_id"],
        )
        self._wanted: Collection[str] = ()  # digests
        self._kept: dict[str, Tensor] = {}
        self._most_kept = 0.0  # bytes

    def grid(self, image: Image) -> tuple[int, int, int]:
        """Patches over time (1), from top to bottom, from left to right; nothing is decoded.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        height, width = smart_resize(
            image.height,
            image.width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self.size_limits["shortest_edge"],
            max_pixels=self.size_limits["longest_edge"],
        )
        return 1, height // self.patch_size, width // self.patch_size

    def num_tokens(self, image: Image) -> int:
        """Image tokens that the image takes in ``Prompt.token_ids``."""
        _, rows, columns = self.grid(image)
        return rows * columns // self.merge_size**2

    def pixels(self, image: Image) -> Float[Tensor, "patches values"]:
        """Float32 patches of ``grid``, on the host: the patches of one feature follow each other.

        A row is channels x temporal patch x patch x patch. Those that ``keep`` names are decoded
        once; they must not be written to.

        Raises:
            ValueError: the image cannot be decoded.
        """
        if isinstance(image, MaskedImage):
            return image.blackened(self.pixels(image.original), self._black)
        kept = self._kept.get(image.digest)
        if kept is not None:
            return kept
        size = dict(self.size_limits)
        made = self._processor(images=[image.rgb()], size=size, return_tensors="pt")
        assert tuple(made["image_grid_thw"][0].tolist()) == self.grid(image)
        pixels: Tensor = made["pixel_values"].to(torch.float32)
        # Passes read images in one order: what came first stays, as an image that made room for
        # another would be gone before the next pass reads it.
        if image.digest in self._wanted and self._kept_bytes + pixels.nbytes <= self._most_kept:
            self._kept[image.digest] = pixels
        return pixels

    def keep(self, images: Iterable[Image]) -> None:
        """The images of a pass, whose pixels stay until a pass has images that are not among them:
        the passes of a step read the same ones, and its minibatches parts of them. Pixels take at
        most a 32nd of the host memory that is free now."""
        wanted = {(one.original if isinstance(one, MaskedImage) else one).digest for one in images}
        if wanted.issubset(self._wanted):
            return
        self._wanted = wanted
        self._kept = {digest: self._kept[digest] for digest in wanted & self._kept.keys()}
        self._most_kept = _KEPT_SHARE * (available_gib() * GIB + self._kept_bytes)

    @property
    def _kept_bytes(self) -> int:
        return sum(pixels.nbytes for pixels in self._kept.values())

    @cached_property
    def _black(self) -> Float[Tensor, " values"]:
        """A patch of a black image."""
        side = self.patch_size * self.merge_size
        size = {"shortest_edge": side**2, "longest_edge": side**2}
        picture = PIL.Image.new("RGB", (side, side))
        made = self._processor(images=[picture], size=size, return_tensors="pt")
        return made["pixel_values"][0].to(torch.float32)

    def expanded(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """``token_ids`` with one image token an image, as a chat template writes them -> those of
        ``Prompt``.

        Raises:
            ValueError: there are more or fewer image tokens than images.
        """
        places = sum(token == self.image_token_id for token in token_ids)
        if places != len(images):
            raise ValueError(f"{places} places of images and {len(images)} images")
        rest = iter(images)
        expanded: list[int] = []
        for token in token_ids:
            is_place = token == self.image_token_id
            expanded += [token] * (self.num_tokens(next(rest)) if is_place else 1)
        return expanded

    def collapsed(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """The inverse of ``expanded``, for an engine that expands by itself.

        Example: with image token 9, and an image of 3 tokens, ``5 9 9 9 6`` gives ``5 9 6``. Two
        images without a token between them make one run, so the length of each decides.

        Raises:
            ValueError: a run of image tokens is not that of its image.
        """
        rest = iter(images)
        collapsed: list[int] = []
        at = 0
        while at < len(token_ids):
            length = 1
            if token_ids[at] == self.image_token_id:
                image = next(rest, None)
                if image is None:
                    raise ValueError(f"image tokens for more than its {len(images)} images")
                length = self.num_tokens(image)
                if any(token != self.image_token_id for token in token_ids[at : at + length]):
                    raise ValueError(f"fewer than {length} image tokens for {image}")
            collapsed.append(token_ids[at])
            at += length
        left = sum(1 for _ in rest)
        if left or at > len(token_ids):
            raise ValueError(f"too few image tokens for its {len(images)} images")
        return collapsed


def has_vision_tower(model_path: str | Path) -> bool:
    """Whether the model of the directory has a vision tower."""
    file = Path(model_path) / "config.json"
    return file.is_file() and "vision_config" in read_json(file)


def vision_of(model_path: str, config: DataConfig) -> VisionProcessor | None:
    """The processor of a vision-language model, with the limits of ``data.*``; None for text.

    Raises:
        ValueError: as ``VisionProcessor``; limits are set for a model of text.
    """
    if has_vision_tower(model_path):
        return VisionProcessor(model_path, config.min_pixels, config.max_pixels)
    for key, value in (("min_pixels", config.min_pixels), ("max_pixels", config.max_pixels)):
        if value is not None:
            raise ValueError(
                f"data.{key} = {value}: the model of model.path = {model_path} sees no images; set"
                " it to null, or give a model that does (Qwen-VL)"
            )
    return None


def _load(folder: Path) -> BaseImageProcessor:
    """The processor with transformers' own choice of backend, as in the engine: two backends differ
    by a grey level where an image is resized."""
    remedy = "copy it again from the model"
    if not (folder / _FILE).is_file():
        raise ValueError(f"model.path: {folder} has no {_FILE}, which images need; {remedy}")
    # The library raises whatever a damaged file leads to.
    with concerning(f"model.path: {folder / _FILE} cannot be read", remedy):
        processor = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if not type(processor).__name__.startswith("Qwen2VLImageProcessor") or not processor.do_resize:
        raise ValueError(
            f"model.path: {folder / _FILE} is of a {type(processor).__name__}; the image processor"
            " of Qwen2-VL, which Qwen2.5-VL and Qwen3-VL have too, is supported, with resizing"
        )
    return processor
