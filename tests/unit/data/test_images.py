"""Images of rows: columns and forms, places in the prompt, token counts from headers, problems."""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoImageProcessor, AutoProcessor

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data import vision as vision_module
from megatron_rl.data.images import parts_of
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.prompts import load_prompts, load_sources, without_overlap
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.vision import VisionProcessor, vision_of
from megatron_rl.types import Image, Prompt
from tests.unit.data.toy import character_tokenizer, data_config
from tools.make_toy_vision_model import write_untrained

QUESTION = "What is it?"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A directory of Qwen2.5-VL; patches of 14, merges of 2."""
    path = tmp_path_factory.mktemp("vision") / "model"
    options = argparse.Namespace(seed=0, layers=1, hidden=64, tower_hidden=32)
    write_untrained(path, [QUESTION], options)
    return path


@pytest.fixture(scope="module")
def vision(model) -> VisionProcessor:
    return VisionProcessor(model)


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image(width: int, height: int, seed: int = 0) -> Image:
    content = png(width, height, seed)
    return Image(hashlib.sha256(content).hexdigest(), width, height, content)


def data_file(folder: Path, *rows: dict, name: str = "t.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt: object, *images: object, **more: object) -> dict:
    return {"prompt": prompt, "answer": "1", "images": list(images), **more}


def settings(*overrides: str) -> DataConfig:
    words = ["model.path=m", "data.train=t", "data.eval=e", *overrides]
    return validate(DataConfig, compose("config", words)["data"], "data")


SIZES = [(84, 84), (77, 101), (300, 20), (9, 9), (56, 57), (640, 480), (1200, 40)]


@pytest.mark.parametrize("limits", [(None, None), (784, 7840), (20000, 40000)])
def test_grids_and_pixels_are_those_of_transformers(model, limits):
    """The processor is asked as transformers' own users do, with the file's pixels."""
    vision = VisionProcessor(model, *limits)
    theirs = AutoImageProcessor.from_pretrained(model)
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


def test_the_processor_is_that_of_the_engine(model, vision):
    """vLLM builds AutoProcessor: another backend is a grey level off where it resizes."""
    try:
        engine = AutoProcessor.from_pretrained(model).image_processor
    except (AttributeError, ImportError, ValueError):
        pytest.skip("torchvision is not installed: vLLM cannot read images here either")
    assert type(vision._processor) is type(engine)


def test_nothing_is_decoded_for_a_count(vision, monkeypatch):
    made = replace(image(84, 56), source=Path("/nowhere.png"))
    assert vision.grid(made) == (1, 4, 6) and vision.num_tokens(made) == 6
    with pytest.raises(ValueError, match=r"image /nowhere\.png: cannot be decoded"):
        vision.pixels(made)


def test_pixels_are_kept_by_digest_and_the_oldest_go(model, monkeypatch):
    one, same, other = image(56, 56), image(56, 56), image(56, 56, seed=1)
    vision = VisionProcessor(model)
    first = vision.pixels(one)
    assert vision.pixels(same) is first
    monkeypatch.setattr(vision_module, "_KEPT_BYTES", first.nbytes)
    assert not torch.equal(vision.pixels(other), first)
    assert vision.pixels(one) is not first


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


def test_every_form_of_an_image_and_of_a_file(tmp_path, vision, tokenizer):
    content = png(84, 84)
    (tmp_path / "a.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    with_bytes = {"bytes": content, "path": "lost.png"}
    files = (
        data_file(tmp_path, row("<image>" + QUESTION, "a.png"), name="path.jsonl"),
        data_file(tmp_path, row("<image>" + QUESTION, uri), name="uri.jsonl"),
        data_file(tmp_path, row("<image>" + QUESTION, {"path": "a.png"}), name="mapping.jsonl"),
        data_file(tmp_path, row("<image>" + QUESTION) | {"images": "a.png"}, name="alone.jsonl"),
        data_file(tmp_path, row("<image>" + QUESTION, with_bytes), name="bytes.parquet"),
        data_file(
            tmp_path, row("<image>" + QUESTION, str(tmp_path / "a.png")), name="absolute.parquet"
        ),
    )
    for file in files:
        (prompt,) = load_prompts(
            file, data_config(columns={"data_source": "auto"}), tokenizer, 99, vision
        )
        (found,) = prompt.images
        assert (found.digest, found.width, found.height) == (
            hashlib.sha256(content).hexdigest(),
            84,
            84,
        )
        assert prompt.token_ids.count(vision.image_token_id) == 9, file
        assert np.array_equal(found.rgb(), PIL.Image.open(io.BytesIO(content)))
        assert prompt.text.count("<|image_pad|>") == 1 and QUESTION in prompt.text


def test_places_in_texts_and_in_parts_are_one_thing(tmp_path, vision, tokenizer):
    (tmp_path / "a.png").write_bytes(png(84, 84))
    (tmp_path / "b.png").write_bytes(png(56, 56))
    text = "first <image> second <image> end"
    parts = [
        {"type": "text", "text": "first "},
        {"type": "image"},
        {"type": "text", "text": " second <image> end"},
    ]
    # As parquet gives it back: a struct has every field.
    filled = [{"text": None, **part} for part in parts]
    loaded = [
        load_prompts(
            data_file(tmp_path, row(form, "a.png", "b.png")),
            data_config(columns={"data_source": None}, prompt_suffix=" Think."),
            tokenizer,
            99,
            vision,
        )[0]
        for form in (
            text,
            [{"role": "user", "content": text}],
            [{"role": "user", "content": parts}],
            [{"role": "user", "content": filled}],
        )
    ]
    assert len({prompt.content for prompt in loaded}) == 1
    runs = [
        len(run)
        for run in "".join(
            "x" if token == vision.image_token_id else " " for token in loaded[0].token_ids
        ).split()
    ]
    assert runs == [9, 4]
    assert loaded[0].text.endswith(" end Think.<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_the_special_tokens_are_written(tmp_path, vision, tokenizer):
    (tmp_path / "a.png").write_bytes(png(56, 56))
    config = data_config(columns={"data_source": None}, apply_chat_template=False)
    (prompt,) = load_prompts(
        data_file(tmp_path, row("a<image>b", "a.png")), config, tokenizer, 99, vision
    )
    start, pad, end = vision.place_ids
    assert prompt.token_ids[1:7] == (start, pad, pad, pad, pad, end) and len(prompt.images) == 1


def test_rows_of_a_model_that_sees_may_have_no_image(tmp_path, vision, tokenizer):
    (tmp_path / "a.png").write_bytes(png(56, 56))
    file = data_file(
        tmp_path, row("plain"), row("<image>x", "a.png"), row("more") | {"images": None}
    )
    config = data_config(columns={"data_source": None})
    plain, seeing, more = load_prompts(file, config, tokenizer, 99, vision)
    assert plain.images == more.images == () and len(seeing.images) == 1


def test_columns_of_easy_r1_and_of_verl(tmp_path, vision, tokenizer):
    item = {"bytes": png(56, 56), "path": None}
    easy = {"problem": "<image>" + QUESTION, "answer": "5", "images": [item]}
    verl = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>" + QUESTION}],
        "images": [item],
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train"},
    }
    (first,) = load_prompts(
        data_file(tmp_path, easy, name="a.parquet"), settings("data=easy_r1"), tokenizer, 99, vision
    )
    (second,) = load_prompts(
        data_file(tmp_path, verl, name="b.parquet"), settings("data=verl"), tokenizer, 99, vision
    )
    assert first.content == second.content and first.answer == second.answer == "5"
    assert second.data_source == "geo3k" and dict(second.extra) == {"split": "train"}


CUT = png(84, 84)[:-40]
PROBLEMS = [
    (row("<image>x", "none.png"), r"row 3: images: the file cannot be read \(No such file"),
    (row("<image>x", "t.jsonl"), "row 3: images: not an image that Pillow knows"),
    (row("<image>x", "cut.png"), "row 3: images: not a readable image"),
    (row("<image>x", "wide.png"), "row 3: images: absolute aspect ratio"),
    (row("<image>x", 7), r"row 3: images: not an image; give paths, \{bytes"),
    (row("<image>x", {"bytes": None, "path": None}), "row 3: images: not an image; give paths"),
    (row("<image>x", "data:image/png,abc"), "row 3: images: a data URI that is not base64"),
    (row("<image>x", "data:image/png;base64,a"), "row 3: images: a data URI that is not base64"),
    (row("<image>x"), r"row 3: 1 places of images \(<image>\) in the prompt for 0 images"),
    (row("x", "a.png"), r"row 3: 0 places of images \(<image>\) in the prompt for 1 images"),
    (row("<image><image>x", "a.png"), "row 3: 2 places .* for 1 images"),
    (
        row("<image> <|image_pad|>", "a.png"),
        "row 3: after the chat template there are 2 places of images and 1 images",
    ),
    (
        row([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "a.png"),
        "row 3: a message has parts other than text",
    ),
    (row("<image>x", "large.png"), r"row 3: prompt longer .* \(\d\d, .*lower data\.max_pixels"),
]


@pytest.mark.parametrize(("bad", "message"), PROBLEMS)
def test_every_problem_is_named_with_file_row_and_field(tmp_path, vision, tokenizer, bad, message):
    (tmp_path / "a.png").write_bytes(png(56, 56))
    (tmp_path / "cut.png").write_bytes(CUT)
    (tmp_path / "wide.png").write_bytes(png(402, 2))
    (tmp_path / "large.png").write_bytes(png(364, 364))
    file = data_file(tmp_path, row("<image>x", "a.png"), row("plain"), bad)
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(file, data_config(columns={"data_source": None}), tokenizer, 60, vision)
    assert str(caught.value).startswith(file) and len(str(caught.value)) < 500


def test_all_problems_are_listed_at_once(tmp_path, vision, tokenizer):
    bad = [row("<image>x", name) for name in ("none.png", "t.jsonl", "gone.png")]
    with pytest.raises(ValueError, match=r"rows 1, 3: images: the file cannot") as caught:
        load_prompts(
            data_file(tmp_path, *bad),
            data_config(columns={"data_source": None}),
            tokenizer,
            99,
            vision,
        )
    assert "row 2: images: not an image" in str(caught.value)


def test_a_place_without_a_column_of_images_is_refused(tmp_path, vision, tokenizer):
    file = data_file(tmp_path, {"prompt": "<image>x", "answer": "1"})
    with pytest.raises(ValueError, match=r"row 1: <image> in the prompt, and no images.*columns"):
        load_prompts(file, data_config(columns={"data_source": None}), tokenizer, 99, vision)


def test_a_model_of_text_refuses_images_and_keeps_the_word(tmp_path):
    """A text may speak of <image>; nothing that is shown is dropped in silence."""
    (tmp_path / "a.png").write_bytes(png(56, 56))
    config = data_config(columns={"data_source": None})
    text = character_tokenizer()
    (prompt,) = load_prompts(data_file(tmp_path, row("the <image> tag")), config, text, 99)
    assert "the <image> tag" in prompt.text and prompt.images == ()
    file = data_file(tmp_path, row("a"), row("<image>x", "a.png"))
    with pytest.raises(
        ValueError, match=r"row 2: images: .*reads no images.*data\.columns\.images"
    ):
        load_prompts(file, config, text, 99)
    config = data_config(columns={"data_source": None, "images": None})
    assert len(load_prompts(file, config, text, 99)) == 2


def test_prompts_of_other_images_are_other_prompts(tmp_path, vision, tokenizer):
    """Two images of one size have the same tokens: overlap, repeats and the digest of the data for
    resume go by the files."""
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(png(56, 56, seed=ord(name)))
    first, second, third = load_prompts(
        data_file(tmp_path, *[row("<image>x", f"{name}.png") for name in "aba"]),
        data_config(columns={"data_source": None}),
        tokenizer,
        99,
        vision,
    )
    assert first.token_ids == second.token_ids and first.content != second.content
    assert without_overlap([first, second, third], [second]) == [first, third]
    streams = [PromptLoader([prompt], seed=1, shuffle=True) for prompt in (first, second)]
    one, other = (replace(prompt, uid="t:1") for prompt in (first, second))
    streams = [PromptLoader([prompt], seed=1, shuffle=True) for prompt in (one, other)]
    with pytest.raises(ValueError, match=r"resume: .* prompts"):
        streams[0].restore(streams[1].state())


def test_the_digest_of_texts_is_what_it_was():
    """Runs that began before images existed go on."""
    stream = PromptLoader([Prompt("t:1", (1, 2), "3", "t")], seed=1, shuffle=True)
    assert (
        stream.state()["prompts"]
        == "1:" + hashlib.sha256(repr(("t:1", (1, 2), "3")).encode()).hexdigest()[:16]
    )


def test_the_budget_counts_expanded_tokens(tmp_path, model, tokenizer):
    (tmp_path / "a.png").write_bytes(png(364, 364))
    file = data_file(tmp_path, row("<image>x", "a.png"))
    config = data_config(columns={"data_source": None}, on_long_prompt="drop")
    large = VisionProcessor(model)
    with pytest.raises(ValueError, match=r"longer than rollout\.max_prompt_tokens = 60"):
        load_sources(file, config, tokenizer, 60, large)
    small = VisionProcessor(model, max_pixels=30 * 784)
    (prompt,) = load_prompts(file, config, tokenizer, 60, small)
    assert prompt.token_ids.count(small.image_token_id) == 25


def test_limits_that_contradict_and_models_of_text(model, tmp_path):
    with pytest.raises(ValueError, match=r"data\.min_pixels = 9999999 is above data\.max_pixels"):
        VisionProcessor(model, min_pixels=9999999)
    (tmp_path / "config.json").write_text("{}")
    assert vision_of(str(tmp_path), data_config()) is None
    with pytest.raises(ValueError, match=r"data\.max_pixels = 5: .*sees no images"):
        vision_of(str(tmp_path), data_config(max_pixels=5))
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        vision_of(str(tmp_path), data_config())


def test_published_names_of_the_limits_are_read(model, tmp_path):
    """preprocessor_config.json of the hub has min_pixels and max_pixels, newer ones size."""
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"min_pixels": 3136, "max_pixels": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert VisionProcessor(tmp_path).size_limits["longest_edge"] == 12845056
    assert VisionProcessor(tmp_path, max_pixels=784 * 9).size_limits == {
        "shortest_edge": 3136,
        "longest_edge": 784 * 9,
    }


def test_parts():
    assert parts_of("a<image>") == [{"type": "text", "text": "a"}, {"type": "image"}]
    assert parts_of("") == [] and parts_of(3) is None and parts_of([3]) is None
    assert parts_of([{"type": "video", "video": "x"}]) is None
