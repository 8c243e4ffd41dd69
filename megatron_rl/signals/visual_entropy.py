"""Visual entropy of the prompts' images under the policy's own tower, as it was at the start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.visual_entropy import visual_entropy
from megatron_rl.data.reading import Data
from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.protocols import ImageProcessor
from megatron_rl.runtime.device import device
from megatron_rl.runtime.launch import World
from megatron_rl.signals.base import Columns, Signal, SignalSetup, StepView
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Image, Prompt

EXTRA = "visual_entropy"
FILE = "visual_entropy.jsonl"
logger = logging.getLogger(__name__)


@register_signal
class VisualEntropy(Signal):
    """``visual_entropy``: of the images of the response's prompt, in nats: ``extra.visual_entropy``
    of its row, or the mean over its images, computed once before the run."""

    about = "`extra.visual_entropy` of every prompt (tools/visual_entropy.py)"
    columns = (EXTRA,)

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        for prompt in prompts:
            if EXTRA not in prompt.extra and not prompt.images:
                raise ValueError(
                    f"prompt {prompt.uid}: the method needs extra.visual_entropy; compute it with"
                    " tools/visual_entropy.py, or use a method without the perceptual part"
                    " (method=durian_reasoning)"
                )

    def prepare(self, data: Data, setup: SignalSetup) -> Data:
        if setup.images is None:
            return data
        file = setup.run_dir / FILE
        return with_visual_entropy(data, setup.model_path, setup.images, file, setup.world)

    def after_rollout(self, view: StepView) -> Columns:
        prompts = view.experience.responses.prompts
        values = [float(prompt.extra[EXTRA]) for prompt in prompts]
        return {EXTRA: torch.tensor(values)}


class Tower:
    """The vision tower of a model directory, float32 and frozen. It is never the one that trains:
    the entropy of an image is a property of the data."""

    def __init__(self, model_path: Path, processor: ImageProcessor) -> None:
        arch, hf = read_architecture(model_path)
        make = FAMILIES[hf.architectures[0]].tower
        assert make is not None and arch.vision is not None, f"{model_path} has no vision tower"
        directory = HfDirectory(model_path, arch.prefixes)
        digest = hashlib.sha256((model_path / "preprocessor_config.json").read_bytes())
        digest.update(repr(sorted(processor.size_limits.items())).encode())
        weights = {}
        for name, _ in arch.vision.tensors:
            tensor = directory.read(name)
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
            weights[name.removeprefix("visual.")] = tensor.float()
        self.fingerprint = digest.hexdigest()
        self._model = make(hf)
        self._model.load_state_dict(weights)
        self._model = self._model.float().to(device()).eval()
        self._processor = processor

    @torch.no_grad()
    def entropy(self, image: Image) -> float:
        """In nats, of the features of the patches before they are merged."""
        pixels = self._processor.pixels(image).to(device())
        grid = torch.tensor([self._processor.grid(image)], device=device())
        features = self._model(pixels, grid_thw=grid).last_hidden_state
        return visual_entropy(features.cpu()).item()


def with_visual_entropy(
    data: Data, model_path: Path, processor: ImageProcessor, file: Path, world: World
) -> Data:
    """Collective. ``data`` with ``extra.visual_entropy`` for every training prompt with images that
    lacks it: the mean over its images, in nats.

    What ``file`` knows of this tower and these image sizes is read; the ranks share the rest, which
    is added to it.

    Raises:
        ValueError: an image cannot be decoded or has a single patch, or ``file`` is damaged.
    """
    images = _wanted(data.train_prompts)
    if not images:
        return data
    tower = Tower(model_path, processor)
    known = world.from_main(partial(_read, file, tower.fingerprint))
    missing = [image for digest, image in images.items() if digest not in known]
    share = missing[world.rank :: world.size]
    made = {image.digest: tower.entropy(image) for image in share}
    new: dict[str, float] = {}
    for part in world.all_gather(made):
        new.update(part)
    world.from_main(partial(_append, file, tower.fingerprint, new))
    if world.is_main:
        logger.info(
            "visual entropy of %d images: %d computed with the tower of %s, %d read from %s",
            len(images),
            len(new),
            model_path,
            len(images) - len(new),
            file,
        )
    values = {**known, **new}
    train = []
    for source in data.train:
        prompts = tuple(_with(prompt, values) for prompt in source.prompts)
        train.append(replace(source, prompts=prompts))
    return replace(data, train=tuple(train))


def _wanted(prompts: Iterable[Prompt]) -> dict[str, Image]:
    """The distinct images of prompts without the value."""
    lacking = [prompt for prompt in prompts if EXTRA not in prompt.extra]
    return {image.digest: image for prompt in lacking for image in prompt.images}


def _with(prompt: Prompt, values: Mapping[str, float]) -> Prompt:
    if EXTRA in prompt.extra or not prompt.images:
        return prompt
    mean = fmean(values[image.digest] for image in prompt.images)
    return replace(prompt, extra={**prompt.extra, EXTRA: mean})


def _read(file: Path, tower: str) -> dict[str, float]:
    """Entropy by image digest; a line that a killed run left half written is skipped."""
    known: dict[str, float] = {}
    lines: Sequence[str] = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row["tower"] == tower:
                known[row["image"]] = float(row["entropy_nats"])
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{file}: line {number} is damaged ({error}); delete the file, it is computed"
                    " again"
                ) from error
    return known


def _append(file: Path, tower: str, values: Mapping[str, float]) -> None:
    if not values:
        return
    rows = [
        {"image": image, "tower": tower, "entropy_nats": value} for image, value in values.items()
    ]
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # without a line that was left half written
    aside = file.with_suffix(".partial")
    aside.write_text(whole + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.replace(file)
