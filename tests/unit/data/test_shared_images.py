"""Prompts with images: one rank of a machine reads them, and the others have the same."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed as dist

from megatron_rl.data import prompt_file, reading
from megatron_rl.data.loader import fingerprint
from megatron_rl.data.multimodal import images
from megatron_rl.data.multimodal.vision import vision_of
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.runtime.launch import World
from tests.ranks import on_ranks
from tests.unit.data.pictures import QUESTION, png
from tests.unit.data.test_reading import config


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory, seeing_folder) -> Path:
    """Rows that name files, rows that hold contents, and rows without images."""
    folder = tmp_path_factory.mktemp("data")
    paths = []
    for seed in range(3):
        (folder / f"{seed}.png").write_bytes(png(84, 56, seed))
        row = {"prompt": "<image>" + QUESTION, "answer": "1", "images": [f"{seed}.png"]}
        paths.append(row)
    paths.append({"prompt": QUESTION, "answer": "2", "images": []})
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paths))
    contents = [{"bytes": png(56, 84, 7), "path": None}, {"bytes": png(28, 28, 8), "path": None}]
    row = {"prompt": "<image><image>" + QUESTION, "answer": "3", "images": contents}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "eval.parquet")
    (folder / "m").symlink_to(seeing_folder)
    return folder


def settings(folder: Path):
    return config(
        f"model.path={folder / 'm'}",
        f"data.train={folder / 'a.jsonl'}",
        f"data.eval={folder / 'eval.parquet'}",
    )


def start(folder: Path, temporary: Path):
    """World, settings, tokenizer and vision of this rank; shared files go to ``temporary``."""
    tempfile.tempdir = str(temporary)
    run = settings(folder)
    return the_world(), run, load_tokenizer(run.model.path), vision_of(run.model.path, run.data)


def contents(data: reading.Data) -> list[tuple[bytes, ...]]:
    prompts = [*data.train_prompts, *data.held_out_prompts]
    return [tuple(image.read() for image in prompt.images) for prompt in prompts]


def the_world() -> World:
    """Two ranks of one machine."""
    rank = dist.get_rank()
    return World(rank=rank, size=2, local_rank=rank, launch_id="test")


@contextmanager
def opened_images() -> Iterator[list]:
    """What this rank looks into meanwhile."""
    opened = []
    with_header = images._with_header

    def noted(source, content):
        opened.append(source)
        return with_header(source, content)

    images._with_header = noted
    try:
        yield opened
    finally:
        images._with_header = with_header


@on_ranks(2)
def test_images_are_read_by_one_rank_of_a_machine(data_folder, tmp_path):
    world, run, tokenizer, vision = start(data_folder, tmp_path)
    with opened_images() as opened:
        shared = shared_data(run, world, tokenizer, vision)
    assert len(opened) == (5, 0)[world.rank]
    own = reading.read_sources(run, tokenizer, vision)
    assert [*shared.train_prompts] == [*own.train_prompts]
    assert shared.held_out_prompts == own.held_out_prompts
    assert contents(shared) == contents(own)
    assert fingerprint(shared.train_prompts) == fingerprint(own.train_prompts)
    first, *_ = shared.train_prompts
    assert first.images[0].source == data_folder / "0.png"
    held = shared.held_out_prompts[0]
    assert held.images[0].rgb().size == (56, 84)
    again = pickle.loads(pickle.dumps(held))
    assert again == held and again.images[0].read() == held.images[0].read()
    dist.barrier()
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_an_evaluation_reads_held_out_images_once_a_machine(data_folder, tmp_path):
    world, run, tokenizer, vision = start(data_folder, tmp_path)
    whole = shared_data(run, world, tokenizer, vision)
    with opened_images() as opened:
        data = shared_data(run.with_values(data={"train": ()}), world, tokenizer, vision)
    assert len(opened) == (2, 0)[world.rank]
    assert not data.train
    assert data.held_out_prompts == whole.held_out_prompts
    assert isinstance(data.held_out[0].prompts, prompt_file.StoredPrompts)


@on_ranks(2)
def test_a_bad_image_is_an_error_of_all_ranks(data_folder, tmp_path):
    world, run, tokenizer, vision = start(data_folder, tmp_path)
    bad = tmp_path / "bad.jsonl"
    if world.is_main:
        row = {"prompt": "<image>" + QUESTION, "answer": "1", "images": ["none.png"]}
        bad.write_text(json.dumps(row) + "\n")
    dist.barrier()
    run = run.model_copy(update={"data": run.data.model_copy(update={"train": str(bad)})})
    with pytest.raises(ValueError, match="the file cannot be read"):
        shared_data(run, world, tokenizer, vision)


@on_ranks(2)
def test_where_no_file_can_be_written_every_rank_reads(data_folder, tmp_path):
    world, run, tokenizer, vision = start(data_folder, tmp_path / "nowhere")
    data = shared_data(run, world, tokenizer, vision)
    assert not isinstance(data.train_prompts, prompt_file.StoredPrompts)
    assert contents(data) == contents(reading.read_sources(run, tokenizer, vision))
