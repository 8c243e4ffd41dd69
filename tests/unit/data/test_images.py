"""Images of rows: columns and forms, places in the prompt, token counts from headers, problems."""

from __future__ import annotations

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

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.multimodal.images import parts_of
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.prompts import load_prompts, load_sources, without_overlap
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types import Prompt
from tests.unit.data.pictures import QUESTION, png
from tests.unit.data.toy import character_tokenizer, data_config


@pytest.fixture(scope="module")
def tokenizer(seeing_folder):
    return load_tokenizer(seeing_folder)


def data_file(folder: Path, *rows: dict, name: str = "t.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt: object, *images: object, **more: object) -> dict:
    return {"prompt": prompt, "answer": "1", "images": list(images), **more}


def load(file: str, tokenizer, vision=None, limit: int = 99, **changes: object) -> list[Prompt]:
    """``load_prompts`` of a file that names no data source."""
    columns = {"data_source": None}
    return load_prompts(file, data_config(columns=columns, **changes), tokenizer, limit, vision)


def settings(*overrides: str) -> DataConfig:
    words = ["model.path=m", "data.train=t", "data.eval=e", *overrides]
    return validate(DataConfig, compose("config", words)["data"], "data")


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
        digest = hashlib.sha256(content).hexdigest()
        assert (found.digest, found.width, found.height) == (digest, 84, 84)
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
    loaded = []
    for form in (text, *([{"role": "user", "content": each}] for each in (text, parts, filled))):
        file = data_file(tmp_path, row(form, "a.png", "b.png"))
        loaded += load(file, tokenizer, vision, prompt_suffix=" Think.")
    assert len({prompt.content for prompt in loaded}) == 1
    marks = ["x" if token == vision.image_token_id else " " for token in loaded[0].token_ids]
    assert [len(run) for run in "".join(marks).split()] == [9, 4]
    assert loaded[0].text.endswith(" end Think.<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_the_special_tokens_are_written(tmp_path, vision, tokenizer):
    (tmp_path / "a.png").write_bytes(png(56, 56))
    file = data_file(tmp_path, row("a<image>b", "a.png"))
    (prompt,) = load(file, tokenizer, vision, apply_chat_template=False)
    start, pad, end = vision.place_ids
    assert prompt.token_ids[1:7] == (start, pad, pad, pad, pad, end) and len(prompt.images) == 1


def test_rows_of_a_model_that_sees_may_have_no_image(tmp_path, vision, tokenizer):
    (tmp_path / "a.png").write_bytes(png(56, 56))
    file = data_file(
        tmp_path, row("plain"), row("<image>x", "a.png"), row("more") | {"images": None}
    )
    plain, seeing, more = load(file, tokenizer, vision)
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
        load(file, tokenizer, vision, limit=60)
    assert str(caught.value).startswith(file) and len(str(caught.value)) - len(file) < 440


def test_all_problems_are_listed_at_once(tmp_path, vision, tokenizer):
    bad = [row("<image>x", name) for name in ("none.png", "t.jsonl", "gone.png")]
    with pytest.raises(ValueError, match=r"rows 1, 3: images: the file cannot") as caught:
        load(data_file(tmp_path, *bad), tokenizer, vision)
    assert "row 2: images: not an image" in str(caught.value)


def test_a_place_without_a_column_of_images_is_refused(tmp_path, vision, tokenizer):
    file = data_file(tmp_path, {"prompt": "<image>x", "answer": "1"})
    with pytest.raises(ValueError, match=r"row 1: <image> in the prompt, and no images.*columns"):
        load(file, tokenizer, vision)


def test_a_model_of_text_refuses_images_and_keeps_the_word(tmp_path):
    """A text may speak of <image>; nothing that is shown is dropped in silence."""
    (tmp_path / "a.png").write_bytes(png(56, 56))
    text = character_tokenizer()
    (prompt,) = load(data_file(tmp_path, row("the <image> tag")), text)
    assert "the <image> tag" in prompt.text and prompt.images == ()
    file = data_file(tmp_path, row("a"), row("<image>x", "a.png"))
    with pytest.raises(
        ValueError, match=r"row 2: images: .*reads no images.*data\.columns\.images"
    ):
        load(file, text)
    config = data_config(columns={"data_source": None, "images": None})
    assert len(load_prompts(file, config, text, 99)) == 2


def test_prompts_of_other_images_are_other_prompts(tmp_path, vision, tokenizer):
    """Two images of one size have the same tokens: overlap, repeats and the digest of the data for
    resume go by the files."""
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(png(56, 56, seed=ord(name)))
    file = data_file(tmp_path, *[row("<image>x", f"{name}.png") for name in "aba"])
    first, second, third = load(file, tokenizer, vision)
    assert first.token_ids == second.token_ids and first.content != second.content
    assert without_overlap([first, second, third], [second]) == [first, third]
    one, other = (replace(prompt, uid="t:1") for prompt in (first, second))
    streams = [PromptLoader([prompt], seed=1, shuffle=True) for prompt in (one, other)]
    with pytest.raises(ValueError, match=r"resume: .* prompts"):
        streams[0].restore(streams[1].state())


def test_the_digest_of_texts_is_what_it_was():
    """Runs that began before images existed continue."""
    stream = PromptLoader([Prompt("t:1", (1, 2), "3", "t")], seed=1, shuffle=True)
    digest = hashlib.sha256(repr(("t:1", (1, 2), "3")).encode()).hexdigest()
    assert stream.state()["prompts"] == f"1:{digest[:16]}"


def test_the_budget_counts_expanded_tokens(tmp_path, seeing_folder, tokenizer):
    (tmp_path / "a.png").write_bytes(png(364, 364))
    file = data_file(tmp_path, row("<image>x", "a.png"))
    config = data_config(columns={"data_source": None}, on_long_prompt="drop")
    large = VisionProcessor(seeing_folder)
    with pytest.raises(ValueError, match=r"longer than rollout\.max_prompt_tokens = 60"):
        load_sources(file, config, tokenizer, 60, large)
    small = VisionProcessor(seeing_folder, max_pixels=30 * 784)
    (prompt,) = load_prompts(file, config, tokenizer, 60, small)
    assert prompt.token_ids.count(small.image_token_id) == 25


def test_parts():
    assert parts_of("a<image>") == [{"type": "text", "text": "a"}, {"type": "image"}]
    assert parts_of("") == [] and parts_of(3) is None and parts_of([3]) is None
    assert parts_of([{"type": "video", "video": "x"}]) is None
