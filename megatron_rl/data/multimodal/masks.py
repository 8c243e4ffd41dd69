"""Images of which patches are hidden."""

import hashlib
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.types import Image


@dataclass(frozen=True)
class MaskedImage(Image):
    """An image of which each patch of an ``ImageProcessor`` is black with some probability.

    Attributes:
        ratio: that probability.
        digest: of the original, the ratio and a seed; decides which patches are black.
    """

    original: Image = field(compare=False)
    ratio: float

    def hidden(self, num_patches: int) -> Bool[Tensor, " patches"]:
        """Drawn for each patch alone, in the order of the processor."""
        generator = torch.Generator().manual_seed(int(self.digest[:15], 16))
        return torch.rand(num_patches, generator=generator) < self.ratio

    def blackened(
        self, patches: Float[Tensor, "patches values"], black: Float[Tensor, " values"]
    ) -> Float[Tensor, "patches values"]:
        """A copy of the original's ``patches``, hidden ones replaced by a ``black`` one."""
        return torch.where(self.hidden(len(patches))[:, None], black, patches)


def masked(image: Image, ratio: float, seed: int) -> MaskedImage:
    """``image`` with a mask of its own for each seed, the same for any prompt that shows it."""
    digest = hashlib.sha256(f"masked {ratio!r} {seed} {image.digest}".encode()).hexdigest()
    return MaskedImage(digest, image.width, image.height, image.source, image, ratio)
