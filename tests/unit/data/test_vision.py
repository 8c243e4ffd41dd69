"""The image processor of a model directory: grids, pixels, image tokens, limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoProcessor

from megatron_rl.data.multimodal import vision as vision_module
from megatron_rl.data.multimodal.masks import masked
from megatron_rl.data.multimodal.vision import VisionProcessor, vision_of
from tests.unit.data.pictures import image
from tests.unit.data.toy import data_config

SIZES = [(84, 84), (77, 101), (300, 20), (9, 9), (56, 57), (640, 480), (1200, 40)]


@pytest.mark.parametrize("limits", [(None, None), (784, 7840), (20000, 40000)])
def test_grids_and_pixels_are_those_of_transformers(seeing_folder, limits):
    """The processor is asked as transformers' own users do, with the file's pixels."""
    vision = VisionProcessor(seeing_folder, *limits)
    theirs = AutoImageProcessor.from_pretrained(seeing_folder)
    if limits[0]:
        assert (vision.size_limits["shortest_edge"], vision.size_limits["longest_edge"]) == limits
    for width, height in SIZES:
        made = image(width, height)
        # Given when it is built, a size yields to the min_pixels and max_pixels of the file.
        size = dict(vision.size_limits)
        expected = theirs(images=[made.rgb()], size=size, return_tensors="pt")
        assert vision.grid(made) == tuple(expected["image_grid_thw"][0].tolist())
        assert vision.num_tokens(made) == expected["image_grid_thw"].prod() // 4
        assert torch.equal(vision.pixels(made), expected["pixel_values"])
        assert vision.pixels(made).dtype == torch.float32


def test_the_processor_is_that_of_the_engine(seeing_folder, vision):
    """vLLM builds AutoProcessor: another backend is a grey level off where it resizes."""
    try:
        engine = AutoProcessor.from_pretrained(seeing_folder).image_processor
    except (AttributeError, ImportError, ValueError):
        pytest.skip("torchvision is not installed: vLLM cannot read images here either")
    assert type(vision._processor) is type(engine)


def test_nothing_is_decoded_for_a_count(vision, monkeypatch):
    made = replace(image(84, 56), source=Path("/nowhere.png"))
    assert vision.grid(made) == (1, 4, 6) and vision.num_tokens(made) == 6
    with pytest.raises(ValueError, match=r"image /nowhere\.png: cannot be decoded"):
        vision.pixels(made)


def test_pixels_of_a_step_are_made_once(seeing_folder, monkeypatch):
    one, same, other = image(56, 56), image(56, 56), image(56, 56, seed=1)
    vision = VisionProcessor(seeing_folder)
    assert vision.pixels(one) is not vision.pixels(one), "no pass has asked for them to be kept"
    vision.keep([one, masked(other, 0.5, 1)])
    first, second = vision.pixels(one), vision.pixels(other)
    vision.keep([same])  # a minibatch of the step
    assert vision.pixels(same) is first and vision.pixels(other) is second
    vision.keep([same, image(28, 28)])  # the next step
    assert vision.pixels(one) is first and vision.pixels(other) is not second
    # Where not all have room the first stay.
    free = 32 * first.nbytes / vision_module.GIB
    monkeypatch.setattr(vision_module, "available_gib", lambda: free)
    tight = VisionProcessor(seeing_folder)
    tight.keep([one, other])
    first, second = tight.pixels(one), tight.pixels(other)
    assert tight.pixels(one) is first and tight.pixels(other) is not second


def test_expanding_and_collapsing_undo_each_other(vision):
    pad = vision.image_token_id
    pictures = [image(84, 84), image(56, 56)]
    short = [7, pad, 8, pad, pad + 1]
    long = vision.expanded(short, pictures)
    assert long == [7, *[pad] * 9, 8, *[pad] * 4, pad + 1]
    assert vision.collapsed(long, pictures) == short
    assert vision.collapsed([7, 8], []) == [7, 8] == vision.expanded([7, 8], [])


def test_tokens_that_are_not_those_of_the_images_are_refused(vision):
    pad = vision.image_token_id
    picture = image(84, 84)
    wrong = (
        ([1, *[pad] * 9, 2], []),  # no image
        ([1, *[pad] * 9, 2, *[pad] * 9], [picture]),  # one too few
        ([1, *[pad] * 9], [picture, picture]),  # one too many
        ([1, *[pad] * 8, 2], [picture]),  # a run that is too short
        ([1, *[pad] * 8], [picture]),  # at the end
        ([1, *[pad] * 10], [picture]),  # too long
        ([1, pad, 2], [picture]),  # not expanded
    )
    for token_ids, pictures in wrong:
        with pytest.raises(ValueError, match="image"):
            vision.collapsed(token_ids, pictures)


def test_limits_that_contradict_and_models_of_text(seeing_folder, tmp_path):
    with pytest.raises(ValueError, match=r"data\.min_pixels = 9999999 is above data\.max_pixels"):
        VisionProcessor(seeing_folder, min_pixels=9999999)
    (tmp_path / "config.json").write_text("{}")
    assert vision_of(str(tmp_path), data_config()) is None
    with pytest.raises(ValueError, match=r"data\.max_pixels = 5: .*sees no images"):
        vision_of(str(tmp_path), data_config(max_pixels=5))
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        vision_of(str(tmp_path), data_config())


def test_published_names_of_the_limits_are_read(seeing_folder, tmp_path):
    """preprocessor_config.json of the hub has min_pixels and max_pixels, newer ones size."""
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((seeing_folder / name).read_text())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"min_pixels": 3136, "max_pixels": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert VisionProcessor(tmp_path).size_limits["longest_edge"] == 12845056
    assert VisionProcessor(tmp_path, max_pixels=784 * 9).size_limits == {
        "shortest_edge": 3136,
        "longest_edge": 784 * 9,
    }
