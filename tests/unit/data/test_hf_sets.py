"""Data sets of the library `datasets`, from folders that it wrote itself. Nothing is fetched."""

from __future__ import annotations

import sys

import datasets
import pytest

from megatron_rl.data import hf_sets
from megatron_rl.data.prompts import load_sources
from tests.unit.data.toy import character_tokenizer, data_config

ROWS = [{"question": f"{number}+1", "answer": f"so\n#### {number + 1}"} for number in range(4)]
CONFIG = data_config(
    columns={"prompt": "question", "data_source": "auto", "extra": "auto"}, answer_after="####"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prompts(entry: str):
    (source,) = load_sources(entry, CONFIG, character_tokenizer(), 99)
    assert source.num_rows == len(source.prompts)
    return source.prompts


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_of_data_files(tmp_path, kind):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        dataset = datasets.Dataset.from_list(rows)
        if kind == "parquet":
            dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        else:
            dataset.to_json(folder / f"{split}.jsonl")
    read = prompts(f"hf:{folder}:train")
    assert [prompt.uid for prompt in read] == [f"gsm8k/train:{row}" for row in range(1, 5)]
    assert [prompt.answer for prompt in read] == ["1", "2", "3", "4"]
    assert {prompt.data_source for prompt in read} == {"gsm8k"}, "which reward.verifier=auto knows"
    assert [prompt.uid for prompt in prompts(f"hf:{folder}:train[1:3]")] == [
        "gsm8k/train[1:3]:1",
        "gsm8k/train[1:3]:2",
    ]
    assert len(prompts(f"hf:{folder}:default:test")) == 1


def test_what_save_to_disk_wrote(tmp_path):
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:2])
    )
    splits.save_to_disk(tmp_path / "both")
    assert len(prompts(f"hf:{tmp_path}/both:test")) == 2
    with pytest.raises(ValueError, match=r"cannot load it .*there are the splits train, test"):
        prompts(f"hf:{tmp_path}/both:validation")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert len(prompts(f"hf:{tmp_path}/one:train")) == 4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("hf:gsm8k", r"write hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"),
        ("hf:a:b:c:d", r"write hf:NAME:SPLIT"),
        ("hf:/nowhere/at/all:train", r"no such folder /nowhere/at/all"),
        ("hf:{}:train", r"cannot load it \(\w+: .*; correct name, configuration and split"),
    ],
)
def test_names_that_lead_nowhere(tmp_path, entry, message):
    with pytest.raises(ValueError, match=message):
        prompts(entry.format(tmp_path))


def test_a_split_that_is_not_there(tmp_path):
    datasets.Dataset.from_list(ROWS).to_json(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"cannot load it .*Unknown split"):
        prompts(f"hf:{tmp_path}:validation")


def test_a_name_on_the_hub_is_its_data_source():
    assert hf_sets.parse("hf:openai/gsm8k:main:train") == hf_sets.HfSet(
        "openai/gsm8k", "main", "train"
    )
    assert hf_sets.parse("hf:openai/gsm8k:main:train").data_source == "openai/gsm8k"


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets; pip install"):
        hf_sets.read_rows("hf:openai/gsm8k:main:train")
