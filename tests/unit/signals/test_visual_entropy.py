"""Visual entropy of a run's images by the tower of its model: values, the file, and its sharing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.reading import Data
from megatron_rl.runtime.launch import World
from megatron_rl.signals.visual_entropy import FILE, Tower, visual_entropy, with_visual_entropy
from megatron_rl.types import Image, Prompt
from tests.ranks import on_ranks
from tests.unit.data.pictures import image, seeing_model
from tools.visual_entropy import Encoder

ALONE = World(rank=0, size=1, local_rank=0, launch_id="test")


FIRST, SECOND = image(84, 84), image(112, 56, seed=1)


def data_of(*prompts: Prompt) -> Data:
    return Data((PromptSource("t", prompts, len(prompts), {}),), (), prompts)


def prompt(*images: Image, **extra: object) -> Prompt:
    return Prompt("t:1", (1, 2), "a", "t", extra=extra, images=images)


def values(data: Data) -> list[float | None]:
    return [one.extra.get("visual_entropy") for one in data.train_prompts]


def stored(file: Path) -> dict[str, dict[str, float]]:
    """By tower and image."""
    return json.loads(file.read_text())


def test_values_are_those_of_the_models_tower_and_of_the_tool(seeing_folder, vision, tmp_path):
    """transformers' whole model, and the tool given the same directory."""
    prompts = [prompt(FIRST), prompt(SECOND, FIRST), prompt(), prompt(FIRST, visual_entropy=7.0)]
    prompts[1] = replace(prompts[1], extra={"level": 3})
    data = with_visual_entropy(data_of(*prompts), seeing_folder, vision, tmp_path / FILE, ALONE)
    tower = (
        Qwen2_5_VLForConditionalGeneration.from_pretrained(seeing_folder)
        .model.visual.float()
        .eval()
    )
    tool = Encoder(seeing_folder)
    expected = []
    for one in (FIRST, SECOND):
        with torch.no_grad():
            grid = torch.tensor([vision.grid(one)])
            features = tower(vision.pixels(one), grid_thw=grid).last_hidden_state
        assert features.shape == (vision.num_tokens(one) * 4, 32), "before the patches are merged"
        expected.append(visual_entropy(features).item())
        assert visual_entropy(tool.features(one.rgb())).item() == pytest.approx(expected[-1], 1e-4)
    first, second = expected
    assert abs(first - second) > 1e-3
    assert values(data) == [
        pytest.approx(first, 1e-5),
        pytest.approx((first + second) / 2, 1e-5),
        None,
        7.0,
    ]
    assert data.train_prompts[1].extra["level"] == 3


def test_what_the_file_knows_is_not_computed_again(seeing_folder, vision, tmp_path, monkeypatch):
    file = tmp_path / FILE
    once = with_visual_entropy(data_of(prompt(FIRST)), seeing_folder, vision, file, ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(Tower, "entropy", lambda *_: pytest.fail("computed again"))
        again = with_visual_entropy(data_of(prompt(FIRST)), seeing_folder, vision, file, ALONE)
    assert values(again) == values(once)
    more = with_visual_entropy(
        data_of(prompt(FIRST), prompt(SECOND)), seeing_folder, vision, file, ALONE
    )
    assert values(more)[0] == values(once)[0] and [*map(len, stored(file).values())] == [2]


def test_another_tower_and_other_sizes_are_other_rows(seeing_folder, vision, tmp_path):
    file = tmp_path / FILE
    large = image(300, 300)
    one = with_visual_entropy(data_of(prompt(large)), seeing_folder, vision, file, ALONE)
    smaller = VisionProcessor(seeing_folder, max_pixels=16 * 784)
    two = with_visual_entropy(data_of(prompt(large)), seeing_folder, smaller, file, ALONE)
    assert values(one) != values(two)
    other = seeing_model(tmp_path / "other", seed=5)
    three = with_visual_entropy(data_of(prompt(large)), other, vision, file, ALONE)
    assert len({*values(one), *values(two), *values(three)}) == 3
    assert len(stored(file)) == 3 and len({*map(tuple, stored(file).values())}) == 1


def test_a_damaged_file_is_named(seeing_folder, vision, tmp_path):
    (tmp_path / FILE).write_text('{"ab')
    with pytest.raises(ValueError, match=r"visual_entropy\.json: .*delete the file"):
        with_visual_entropy(data_of(prompt(FIRST)), seeing_folder, vision, tmp_path / FILE, ALONE)


def test_prompts_without_images_need_no_tower(tmp_path, vision):
    data = data_of(prompt())
    assert with_visual_entropy(data, tmp_path / "no model", vision, tmp_path / FILE, ALONE) is data


@on_ranks(2)
def test_ranks_share_the_images(seeing_folder: Path, folder: Path) -> None:
    """Each computes every other one; together they know all."""
    rank = dist.get_rank()
    world = World(rank=rank, size=2, local_rank=rank, launch_id="test")
    vision = VisionProcessor(seeing_folder)
    data = data_of(*[prompt(image(56, 56, seed)) for seed in range(5)])
    computed = []
    entropy = Tower.entropy

    def noted(self: Tower, one: Image) -> float:
        computed.append(one.digest)
        return entropy(self, one)

    Tower.entropy = noted
    shared = with_visual_entropy(data, seeing_folder, vision, folder / FILE, world)
    assert len(computed) == (3, 2)[rank]
    alone = with_visual_entropy(data, seeing_folder, vision, folder / f"{rank}.json", ALONE)
    assert len(computed) == (3, 2)[rank] + 5 and values(shared) == values(alone)
    assert [*map(len, stored(folder / FILE).values())] == [5]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path
