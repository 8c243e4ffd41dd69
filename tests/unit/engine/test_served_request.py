"""Images on their way to a server: the pixels that arrive are those that the policy sees."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass

import numpy as np
import PIL.Image
import pytest
from vllm.multimodal.media.image import ImageMediaIO

from megatron_rl.engine.requests import MultimodalConfig, check_expansion, served_request
from megatron_rl.types import Image

PLACE = 7


@dataclass
class OneToken:
    """A processor that gives each image one token."""

    def collapsed(self, token_ids, images):
        if list(token_ids).count(PLACE) != len(images):
            raise ValueError("other images")
        return list(token_ids)


SIGHT = MultimodalConfig(OneToken(), max_images=2)


def file(mode: str, kind: str, **options) -> Image:
    """A picture of random pixels, also transparent ones."""
    rng = np.random.default_rng(0)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    picture = PIL.Image.fromarray(rng.integers(0, 256, (20, 30, *channels), dtype=np.uint8), mode)
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    content = buffer.getvalue()
    return Image(hashlib.sha256(content).hexdigest(), 30, 20, content)


def turned() -> Image:
    """A photograph that says it was taken upright."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return file("RGB", "JPEG", exif=exif)


@pytest.mark.parametrize(
    "image", [file("RGB", "JPEG"), file("L", "PNG"), file("RGBA", "PNG"), turned()]
)
def test_a_server_decodes_the_pixels_that_the_policy_sees(image):
    asked = served_request([1, PLACE, 2], [image], SIGHT, "prompt 3")
    assert asked["token_ids"] == [1, PLACE, 2] and asked["return_token_ids"]
    (part,) = asked["content_parts"]
    assert part["type"] == "image_url" and part["uuid"] == image.digest
    kind, _, data = part["url"].partition(";base64,")
    assert kind == "data:image/png"
    arrived = ImageMediaIO().load_bytes(base64.b64decode(data)).media
    assert arrived.mode == "RGB"
    assert np.array_equal(np.asarray(arrived), np.asarray(image.rgb()))


def test_a_text_is_asked_as_always():
    assert served_request([1, 2], (), None, "prompt 3") == {"token_ids": [1, 2]}
    assert served_request([1, 2], (), SIGHT, "prompt 3") == {"token_ids": [1, 2]}


def test_an_image_that_would_get_lost_is_refused():
    with pytest.raises(ValueError, match="prompt 3: has 1 images, the engine was built for 0"):
        served_request([1, PLACE], [turned()], None, "prompt 3")
    with pytest.raises(ValueError, match="prompt 3: its tokens are not those of its images"):
        served_request([1, 2], [turned()], SIGHT, "prompt 3")
    with pytest.raises(RuntimeError, match="prompt 3: vLLM read a prompt of 0 tokens, not the 2"):
        check_expansion([1, PLACE], (), "prompt 3")
