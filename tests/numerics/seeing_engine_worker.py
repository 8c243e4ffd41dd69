"""One process: a real engine of a Qwen-VL, of the family that is named, beside transformers: what
it makes of images, what it refuses, what is left of the old tower after each kind of weight sync.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.runtime import launch
from megatron_rl.types import Completion, Image, Prompt
from tests.numerics import rollout_models as small
from tests.numerics.seeing import hf_logprobs, write_model
from tests.unit.data.pictures import image
from tests.zoo import save

WORLD = launch.start()
PATH = Path(sys.argv[1]) / "model"


MODEL = write_model(PATH, family=sys.argv[2])
VISION = VisionProcessor(PATH, max_pixels=20 * 784)
CONFIG = small.engine_config(max_prompt_tokens=100, max_response_tokens=16)
ENGINE = VllmEngine(
    str(PATH),
    CONFIG,
    seed=0,
    launch_id=WORLD.launch_id,
    multimodal=MultimodalConfig(VISION, max_images=2),
)
PAD = VISION.image_token_id
BOUND = 5e-6  # nats of one token; both sides compute in float32
SAMPLING = small.sampling(num_responses=3, max_response_tokens=8)


def prompt(uid: str, *images: Image, end: Sequence[int] = (20, 21)) -> Prompt:
    """Words, and each image between the tokens that stand around it."""
    start, _, stop = VISION.place_ids
    short = [10, *(token for _ in images for token in (start, PAD, stop)), 11, *end]
    return Prompt(uid, tuple(VISION.expanded(short, images)), "", "t", images=images)


# 640 x 480 pixels are above the limit; equal sizes with other content; text alone.
FIRST, SECOND = image(84, 84), image(84, 84, seed=1)
PROMPTS = [
    prompt("one", FIRST),
    prompt("two", FIRST, image(56, 140)),
    prompt("large", image(640, 480)),
    prompt("text"),
    prompt("other", SECOND),
]


def their_logprobs(asked: Prompt, response: Sequence[int]) -> torch.Tensor:
    """transformers' logprobs of the response; image tokens of the prompt alone are places."""
    return hf_logprobs(MODEL, asked, response, VISION)


def largest_gap(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> float:
    """The largest |engine - transformers| of a sampled token."""
    return max(
        (torch.tensor(one.sampler_logprobs) - their_logprobs(asked, one.token_ids))
        .abs()
        .max()
        .item()
        for asked, group in zip(prompts, groups, strict=True)
        for one in group
    )


def agree(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> None:
    found = {
        asked.uid: largest_gap([asked], [group])
        for asked, group in zip(prompts, groups, strict=True)
    }
    assert max(found.values()) <= BOUND, found


def sampled_logprobs_are_those_of_transformers() -> None:
    groups = ENGINE.generate(PROMPTS, SAMPLING)
    agree(PROMPTS, groups)
    again = ENGINE.generate(PROMPTS, SAMPLING)  # from the caches of prefixes and images
    assert [[one.token_ids for one in group] for group in again] == [
        [one.token_ids for one in group] for group in groups
    ]
    agree(PROMPTS, again)
    swapped = [replace(PROMPTS[0], images=(SECOND,))]
    assert largest_gap(swapped, [groups[0]]) > 1e-3, "the image decides"


def image_tokens_in_a_response_are_words() -> None:
    """A policy does sample them; they are no places of images."""
    groups = ENGINE.generate(PROMPTS[:1], small.sampling(num_responses=100, max_response_tokens=8))
    assert any(PAD in one.token_ids for one in groups[0])
    agree(PROMPTS[:1], groups)


def a_response_goes_on_behind_its_images_and_tokens() -> None:
    """Also where it has sampled the token of an image; what is paused has its tokens."""
    there = {0: (20, PAD, 21), 1: (17,), 2: (17, 18)}
    longer = replace(SAMPLING, max_response_tokens=16)
    num_paused = 0
    for asked in PROMPTS:
        request_ids = ENGINE.submit(asked, list(there), longer, there)
        found = dict(ENGINE.poll())
        paused = list(ENGINE.running_lengths())[-1:]
        num_paused += len(paused)
        found.update(zip(paused, ENGINE.pause(paused), strict=True))
        while ENGINE.running_lengths():
            found.update(ENGINE.poll())
        assert found.keys() == set(request_ids)
        for request_id, before in zip(request_ids, there.values(), strict=True):
            new = found[request_id]
            assert 0 < len(new.token_ids) <= longer.max_response_tokens - len(before)
            want = their_logprobs(asked, [*before, *new.token_ids])[len(before) :]
            assert (torch.tensor(new.sampler_logprobs) - want).abs().max() <= BOUND
    assert num_paused > 1


def scores_of_prompts_with_images() -> None:
    rows = ENGINE.score([one.token_ids for one in PROMPTS], [one.images for one in PROMPTS])
    for asked, row in zip(PROMPTS, rows, strict=True):
        last = max([0, *(at for at, token in enumerate(asked.token_ids) if token == PAD)]) + 1
        cut = replace(asked, token_ids=asked.token_ids[:last])
        want = their_logprobs(cut, asked.token_ids[last:])
        assert (torch.tensor(row[last - 1 :]) - want).abs().max() <= BOUND


def refused() -> None:
    one = PROMPTS[0]
    short = tuple(VISION.collapsed(one.token_ids, one.images))
    twice = one.token_ids + one.token_ids
    foreign = VisionProcessor(PATH, max_pixels=64 * 784)
    large = image(640, 480)
    start, _, stop = VISION.place_ids
    other_limits = tuple(foreign.expanded([start, PAD, stop, 9], [large]))
    for wrong, words in (
        (replace(one, token_ids=short), "image tokens"),
        (replace(one, images=()), "image tokens"),
        (replace(one, token_ids=twice), "image tokens"),
        (replace(one, images=(FIRST, SECOND)), "image tokens"),
        (replace(one, images=(FIRST,) * 3), "the engine was built for 2"),
        (replace(PROMPTS[3], images=(FIRST,)), "image tokens"),
        (replace(one, token_ids=other_limits, images=(large,)), "data.max_pixels"),
    ):
        try:
            ENGINE.generate([wrong], SAMPLING)
        except ValueError as error:
            assert words in str(error) and f"prompt {wrong.uid}" in str(error), error
        else:
            raise AssertionError(f"{words}: was not refused")
    agree(PROMPTS[:1], ENGINE.generate(PROMPTS[:1], SAMPLING))


def another_processor_is_noticed() -> None:
    """What vLLM made of the prompt is compared with what the policy trains on."""
    collapsed = VISION.collapsed

    def one_word_more(token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        return [*collapsed(token_ids, images), 12]

    VISION.collapsed = one_word_more
    try:
        ENGINE.generate(PROMPTS[:1], SAMPLING)
    except RuntimeError as error:
        assert "vLLM read a prompt of" in str(error)
    else:
        raise AssertionError("other token ids went unnoticed")
    finally:
        del VISION.collapsed


def change_the_tower(seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the tower alone; returns all of the model by their published names."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in MODEL.model.visual.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std().nan_to_num(0.1))
    with tempfile.TemporaryDirectory() as folder:
        save(MODEL, Path(folder))
        return load_file(Path(folder) / "model.safetensors")


def a_gathered_sync_leaves_nothing_of_the_old_tower() -> None:
    """Without the remedy the next use of a known image raises: the worker drops its features and
    the scheduler still lists them."""
    ENGINE.generate(PROMPTS, SAMPLING)
    for version in (1, 2):
        before = their_logprobs(PROMPTS[0], (5, 6, 7))
        ENGINE.load_weights(iter(change_the_tower(version).items()), version)
        assert (their_logprobs(PROMPTS[0], (5, 6, 7)) - before).abs().max() > 1e-3
        agree(PROMPTS, ENGINE.generate(PROMPTS, SAMPLING))


def a_planned_sync_leaves_nothing_of_the_old_tower() -> None:
    """Without the remedy the old features are used on, without an error."""
    boxes = ENGINE.weight_shards()
    ENGINE.generate(PROMPTS, SAMPLING)
    weights = change_the_tower(9)

    def transfer(parameter, written) -> None:
        for box in boxes:
            part = weights[box.name][
                tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))
            ]
            target = parameter(box.key)
            storage = target.as_strided(box.shape, box.stride, target.storage_offset() + box.offset)
            storage.copy_(part)
        for key in dict.fromkeys(box.key for box in boxes):
            written(key)

    ENGINE.update_weights(transfer, 3)
    agree(PROMPTS, ENGINE.generate(PROMPTS, SAMPLING))


def an_engine_without_files_sees_after_a_sync() -> None:
    """What the model computes for itself (how an image is normalized) is in no file and no sync."""
    awaited = expected_tensors(PATH)
    multimodal = MultimodalConfig(VISION, max_images=2)
    engine = VllmEngine(
        str(PATH),
        CONFIG,
        seed=0,
        launch_id=WORLD.launch_id,
        multimodal=multimodal,
        expected=awaited,
    )
    weights = change_the_tower(5)
    try:
        engine.generate(PROMPTS, SAMPLING)
    except RuntimeError as error:
        assert "built without weights" in str(error), "the files were not read"
    else:
        raise AssertionError("an engine without weights has answered")
    engine.load_weights(iter(weights.items()), 1)
    agree(PROMPTS, engine.generate(PROMPTS, SAMPLING))


def the_logprob_check_sees_a_stale_tower() -> None:
    """The engine keeps the old tower, all else is new: prompts of text show nothing."""
    images = [one.images for one in PROMPTS]
    rows = ENGINE.score([one.token_ids for one in PROMPTS], images)
    change_the_tower(12)
    seen = {}
    for asked, row in zip(PROMPTS, rows, strict=True):
        last = max([0, *(at for at, token in enumerate(asked.token_ids) if token == PAD)]) + 1
        cut = replace(asked, token_ids=asked.token_ids[:last])
        want = their_logprobs(cut, asked.token_ids[last:])
        seen[asked.uid] = (torch.tensor(row[last - 1 :]) - want).abs().mean().item()
    assert seen["text"] <= BOUND and seen["one"] > 1e-4, seen


CASES = (
    sampled_logprobs_are_those_of_transformers,
    image_tokens_in_a_response_are_words,
    a_response_goes_on_behind_its_images_and_tokens,
    scores_of_prompts_with_images,
    refused,
    another_processor_is_noticed,
    a_gathered_sync_leaves_nothing_of_the_old_tower,
    a_planned_sync_leaves_nothing_of_the_old_tower,
    an_engine_without_files_sees_after_a_sync,
    the_logprob_check_sees_a_stale_tower,
)

if __name__ == "__main__":
    small.run_cases(CASES)
