"""Images of which patches are black: which ones, and what the image processor makes of them."""

from __future__ import annotations

from dataclasses import replace

import PIL.Image
import torch

from megatron_rl.data.multimodal.masks import masked
from megatron_rl.data.multimodal.vision import VisionProcessor
from tests.unit.data.pictures import image


def test_hidden_patches_follow_from_image_ratio_and_seed() -> None:
    one, other = image(84, 56), image(84, 56, seed=1)
    hidden = masked(one, 0.6, 7).hidden(24)
    assert torch.equal(masked(one, 0.6, 7).hidden(24), hidden)
    drawn = [hidden, *[masked(*each).hidden(24) for each in ((one, 0.6, 8), (other, 0.6, 7))]]
    assert len({tuple(each.tolist()) for each in drawn}) == 3
    assert (
        len({masked(*each).digest for each in ((one, 0.6, 7), (one, 0.5, 7), (one, 0.6, 8))}) == 3
    )
    assert masked(one, 0.6, 7) == masked(one, 0.6, 7) != masked(one, 0.6, 8)


def test_the_share_of_hidden_patches_is_the_ratio() -> None:
    """Of 100,000 independent draws: within 5 standard deviations."""
    for ratio in (0.1, 0.6):
        share = masked(image(84, 56), ratio, 0).hidden(100_000).double().mean()
        assert abs(share - ratio) < 5 * (ratio * (1 - ratio) / 100_000) ** 0.5
    assert not masked(image(84, 56), 0.0, 0).hidden(1000).any()
    assert masked(image(84, 56), 1.0, 0).hidden(1000).all()


def test_hidden_patches_are_those_of_a_black_image(vision: VisionProcessor) -> None:
    """Also where an image is resized; size and tokens stay."""
    for width, height in ((84, 56), (77, 101), (20, 300)):
        plain = image(width, height)
        hiding = masked(plain, 0.6, 3)
        assert vision.grid(hiding) == vision.grid(plain)
        assert vision.num_tokens(hiding) == vision.num_tokens(plain)
        before = vision.pixels(plain).clone()
        found = vision.pixels(hiding)
        assert torch.equal(vision.pixels(plain), before)
        hidden = hiding.hidden(len(before))
        assert hidden.any() and not hidden.all()
        assert torch.equal(found[~hidden], before[~hidden])
        size = dict(vision.size_limits)
        black = PIL.Image.new("RGB", (width, height))
        made = vision._processor(images=[black], size=size, return_tensors="pt")
        assert torch.equal(found[hidden], made["pixel_values"][hidden])


def test_a_mask_of_nothing_and_of_everything(vision: VisionProcessor) -> None:
    plain = image(84, 84)
    assert torch.equal(vision.pixels(masked(plain, 0.0, 1)), vision.pixels(plain))
    everything = vision.pixels(masked(plain, 1.0, 1))
    assert torch.equal(everything, everything[:1].expand_as(everything))


def test_masked_pixels_are_not_kept(seeing_folder) -> None:
    """Each step has new ones."""
    vision = VisionProcessor(seeing_folder)
    plain = image(84, 84)
    hiding = masked(plain, 0.6, 1)
    vision.keep([hiding])
    vision.pixels(hiding)
    assert list(vision._kept) == [plain.digest]
    assert vision.num_tokens(replace(plain, digest="x")) == 9
