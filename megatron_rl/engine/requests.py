"""Requests of vLLM, made from prompts, and checks that no image gets lost on the way."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.errors import concerning
from megatron_rl.protocols import ImageProcessor
from megatron_rl.types import Image, Prompt, Sampling


@dataclass(frozen=True)
class MultimodalConfig:
    """What an engine is built with whose prompts have images: the processor of the policy, and the
    most images of a prompt.

    Example: ``MultimodalConfig(processor, max_images=2)``.
    """

    processor: ImageProcessor
    max_images: int


def multimodal_config(
    prompts: Iterable[Prompt], processor: ImageProcessor | None
) -> MultimodalConfig | None:
    """The config of an engine for ``prompts``; None where none of them has an image."""
    most = max((len(prompt.images) for prompt in prompts), default=0)
    return None if processor is None or most == 0 else MultimodalConfig(processor, most)


def request(
    token_ids: Sequence[int],
    images: Sequence[Image],
    multimodal: MultimodalConfig | None,
    what: str,
) -> dict[str, Any]:
    """The request for a prompt whose image tokens are expanded, to an engine in this process.
    Raises as ``as_asked`` does."""
    asked: dict[str, Any] = {"prompt_token_ids": as_asked(token_ids, images, multimodal, what)}
    if images:
        asked["multi_modal_data"] = {"image": [image.rgb() for image in images]}
        asked["multi_modal_uuids"] = {"image": [image.digest for image in images]}
    return asked


def served_request(
    token_ids: Sequence[int],
    images: Sequence[Image],
    multimodal: MultimodalConfig | None,
    what: str,
) -> dict[str, Any]:
    """The same to a server; with images it is to say what it made of their tokens. Raises as
    ``as_asked`` does."""
    asked: dict[str, Any] = {"token_ids": as_asked(token_ids, images, multimodal, what)}
    if images:
        asked["content_parts"] = [
            {"type": "image_url", "url": _as_url(image), "uuid": image.digest} for image in images
        ]
        asked["return_token_ids"] = True
    return asked


@lru_cache(maxsize=64)  # the requests of a group follow each other
def _as_url(image: Image) -> str:
    """The pixels that an engine in this process is given, without loss: of transparency and of
    turned photographs a server makes something else."""
    buffer = io.BytesIO()
    image.rgb().save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def as_asked(
    token_ids: Sequence[int],
    images: Sequence[Image],
    multimodal: MultimodalConfig | None,
    what: str,
) -> list[int]:
    """The token ids of a prompt as vLLM needs them.

    vLLM needs one token an image and expands it itself: given the expanded ids it would expand them
    once more, and given too few images it would read image tokens as text, without an error. So
    both are compared here. It knows images by name and keeps their features under it: the name is
    the digest of the file.

    Raises:
        ValueError: the engine was built without images or for fewer, or the image tokens are not
            those of the images; names ``what``.
    """
    most = multimodal.max_images if multimodal is not None else 0
    if len(images) > most:
        raise ValueError(
            f"{what}: has {len(images)} images, the engine was built for {most} in a prompt; build"
            " it for the most"
        )
    if multimodal is None:
        return list(token_ids)
    subject = f"{what}: its tokens are not those of its images"
    settings = "the preprocessor_config.json, data.min_pixels and data.max_pixels of the engine"
    with concerning(subject, f"load it with {settings}", (ValueError,)):
        return multimodal.processor.collapsed(token_ids, images)


def behind(prepared: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    """A request for what follows a prompt and the first tokens of a response to it."""
    if not token_ids:
        return dict(prepared)
    return {**prepared, "prompt_token_ids": [*prepared["prompt_token_ids"], *token_ids]}


def check_request(prompt: Prompt, sampling: Sampling, config: RolloutConfig) -> None:
    """Raises ValueError for what an engine was not built for."""
    if sampling.max_response_tokens > config.max_response_tokens:
        raise ValueError(
            f"sampling: {sampling.max_response_tokens} response tokens wanted,"
            f" rollout.max_response_tokens is {config.max_response_tokens}; raise it"
        )
    if sampling.stop and not config.stop:
        raise ValueError(
            f"sampling: stop strings {list(sampling.stop)} need rollout.stop, with which the"
            " engine loads its tokenizer"
        )
    if sampling.annealing is not None:
        if config.anneal.schedule is None:
            raise ValueError(
                "sampling: an annealed temperature needs rollout.anneal.start, with which the"
                " engine is built for it"
            )
        if sampling.temperature != 1.0:
            raise ValueError(
                f"sampling: the temperature is annealed, and the constant one is"
                f" {sampling.temperature:g}; set it to 1"
            )
    if sampling.num_kept > max(config.top_k, 0):
        raise ValueError(
            f"sampling: the {sampling.num_kept} tokens that the sampler keeps are wanted,"
            f" rollout.top_k is {config.top_k}, with which the engine is built for them; raise it"
        )
    if len(prompt.token_ids) > config.max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.uid}: {len(prompt.token_ids)} tokens, rollout.max_prompt_tokens is"
            f" {config.max_prompt_tokens}; raise it or drop the prompt"
        )


def check_expansion(token_ids: Sequence[int], read: Sequence[int], what: str) -> None:
    """Raises RuntimeError where vLLM computed another prompt, ``read``, than ``token_ids``."""
    if list(read) != list(token_ids):
        raise RuntimeError(
            f"{what}: vLLM read a prompt of {len(read)} tokens, not the"
            f" {len(token_ids)} that the policy trains on; its image processor and that of"
            " data.vision differ"
        )
