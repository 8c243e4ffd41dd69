"""From prompts to requests of vLLM, and back: an image must not get lost on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.protocols import ImageProcessor
from megatron_rl.types import Image, Prompt, Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@dataclass(frozen=True)
class Sight:
    """What an engine is built with whose prompts have images: the processor of the policy, and the
    most images of a prompt.

    Example: ``Sight(processor, max_images=2)``.
    """

    processor: ImageProcessor
    max_images: int


def sight_of(prompts: Iterable[Prompt], processor: ImageProcessor | None) -> Sight | None:
    """For an engine that is to answer ``prompts``; None where none of them has an image."""
    most = max((len(prompt.images) for prompt in prompts), default=0)
    return None if processor is None or most == 0 else Sight(processor, most)


def request(
    token_ids: Sequence[int], images: Sequence[Image], sight: Sight | None, what: str
) -> dict[str, Any]:
    """The request for a prompt whose image tokens are expanded.

    vLLM wants one token an image and expands it itself: given the expanded ids it would expand them
    once more, and given too few images it would read image tokens as text, without an error. So
    both are compared here. It knows images by name and keeps their features under it: the name is
    the digest of the file.

    Raises:
        ValueError: the engine was built without images or for fewer, or the image tokens are not
            those of the images; names ``what``.
    """
    most = sight.max_images if sight is not None else 0
    if len(images) > most:
        raise ValueError(
            f"{what}: has {len(images)} images, the engine was built for {most} in a prompt; build"
            " it for the most"
        )
    if sight is None:
        return {"prompt_token_ids": list(token_ids)}
    try:
        collapsed = sight.processor.collapsed(token_ids, images)
    except ValueError as error:
        raise ValueError(
            f"{what}: its tokens are not those of its images: {error}; load it with the"
            " preprocessor_config.json, data.min_pixels and data.max_pixels of the engine"
        ) from error
    if not images:
        return {"prompt_token_ids": collapsed}
    return {
        "prompt_token_ids": collapsed,
        "multi_modal_data": {"image": [image.rgb() for image in images]},
        "multi_modal_uuids": {"image": [image.digest for image in images]},
    }


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
                f"sampling: the temperature is annealed, and {sampling.temperature:g} beside it;"
                " set it to 1"
            )
    if len(prompt.token_ids) > config.max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.uid}: {len(prompt.token_ids)} tokens, rollout.max_prompt_tokens is"
            f" {config.max_prompt_tokens}; raise it or drop the prompt"
        )


def check_expansion(token_ids: Sequence[int], output: RequestOutput, what: str) -> None:
    """Raises RuntimeError where vLLM computed another prompt than ``token_ids``."""
    if list(output.prompt_token_ids) != list(token_ids):
        raise RuntimeError(
            f"{what}: vLLM read a prompt of {len(output.prompt_token_ids)} tokens, not the"
            f" {len(token_ids)} that the policy trains on; its image processor and that of"
            " data.vision differ"
        )
