"""Visual entropy of the prompts' images under the policy's own tower, as it was at the start: how
complex an image looks to a frozen vision encoder."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.schema import Config
from megatron_rl.data.reading import Data, all_prompts
from megatron_rl.errors import concerning
from megatron_rl.models import FAMILIES, read_architecture
from megatron_rl.models.parameter_map import vision_parameters
from megatron_rl.protocols import ImageProcessor
from megatron_rl.reporting.metrics_file import replace_text
from megatron_rl.runtime.device import device
from megatron_rl.runtime.launch import World
from megatron_rl.signals.base import Columns, Signal, SignalSetup, StepView
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Image, Prompt

EXTRA = "visual_entropy"
FILE = "visual_entropy.json"
CHUNK = 1024  # rows, or columns, of the features multiplied at a time
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
        values = [float(prompt.extra[EXTRA]) for prompt in view.experience.responses.prompts]
        return {EXTRA: torch.tensor(values)}


def visual_entropy(features: Float[Tensor, "patches d"]) -> Float[Tensor, ""]:
    """Entropy of the spectrum of patch features, H = -sum p_k ln p_k in nats; 0 for equal ones.

    p are the eigenvalues of the patch covariance C = F' F / (patches - 1), divided by their sum,
    with F centered over patches. The non-zero eigenvalues of C are those of F F' / (patches - 1),
    so the smaller of the two is decomposed; products are accumulated in chunks, in float64.

    Raises:
        ValueError: fewer than two patches.

    Source: Durian (arXiv 2602.21743) eq. 5-9.
    """
    patches, width = features.shape
    if patches < 2:
        raise ValueError(
            f"visual_entropy needs at least 2 patches and got {patches}; use a larger image or a"
            " smaller patch size"
        )
    centered = features.double() - features.double().mean(0)
    rows = centered if patches <= width else centered.T  # the shorter side first
    size = rows.shape[0]
    gram = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for chunk in rows.split(CHUNK, dim=1):
        gram += chunk @ chunk.T
    # Rounding can make a zero eigenvalue slightly negative.
    eigenvalues = torch.linalg.eigvalsh(gram / (patches - 1)).clamp(min=0)
    # Equal patches have no variance at all: 0 / tiny gives shares of 0, and those 0 ln 0 = 0.
    share = eigenvalues / eigenvalues.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return -torch.special.xlogy(share, share).sum()


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
        for parameter in vision_parameters(arch):
            name = parameter.slot.megatron
            tensor = directory.read(parameter.names[0])
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
        grid = torch.tensor([self._processor.grid(image)])
        return visual_entropy(self._model(pixels, grid_thw=grid).last_hidden_state.cpu()).item()


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
    lacking = [prompt for prompt in data.train_prompts if EXTRA not in prompt.extra]
    images = {image.digest: image for prompt in lacking for image in prompt.images}
    if not images:
        return data
    tower = Tower(model_path, processor)
    # By tower, then by image.
    stored: dict[str, dict[str, float]] = world.from_main(partial(_read, file))
    known = stored.setdefault(tower.fingerprint, {})
    missing = [image for digest, image in images.items() if digest not in known]
    share = missing[world.rank :: world.size]
    for part in world.all_gather({image.digest: tower.entropy(image) for image in share}):
        known.update(part)
    if missing:
        world.from_main(lambda: replace_text(file, json.dumps(stored) + "\n"))
    if world.is_main:
        sources = (len(images), len(missing), model_path, file)
        logger.info("visual entropy of %d images: %d by the tower of %s, others of %s", *sources)
    train = tuple(
        replace(source, prompts=tuple(_with(prompt, known) for prompt in source.prompts))
        for source in data.train
    )
    return replace(data, train=train, train_prompts=all_prompts(train))


def _with(prompt: Prompt, values: Mapping[str, float]) -> Prompt:
    if EXTRA in prompt.extra or not prompt.images:
        return prompt
    mean = fmean(values[image.digest] for image in prompt.images)
    return replace(prompt, extra={**prompt.extra, EXTRA: mean})


def _read(file: Path) -> dict[str, dict[str, float]]:
    if not file.is_file():
        return {}
    with concerning(str(file), "delete the file, it is computed again", (ValueError,)):
        return json.loads(file.read_text(encoding="utf-8"))
