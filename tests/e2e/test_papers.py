"""A miniature of each preset of conf/experiment/papers, and of each row of the papers' tables, is
trained for two steps on both real engines: the preset as it is, but for what two cores, a tiny
model and 32 prompts ask for."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.reporting.metrics import metric
from tests.e2e import toy
from tests.e2e.test_methods import check, two_steps_each
from tests.launch import launch
from tests.unit.data.pictures import png
from tests.unit.planning.test_papers import ROWS, TABLE
from tools.make_toy_model import make_model, make_tokenizer
from tools.make_toy_vision_model import write_untrained

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
PROMPTS_PER_STEP = 16
# Responses of one token. Where three are likely, about a fifth of the responses is right.
ANSWERS = [
    *(rf"<think>a</think>\boxed{{{answer}}}" for answer in ("1", "2", "awe", "fear")),
    *(f"<think>a</think><answer>{answer}</answer>" for answer in ("1", "2")),
    r"\boxed{1}",
    "<|im_end|>",
]
# Every key that a miniature may have otherwise than its preset. Anything else is the paper's.
OF_TWO_CORES = {
    *("run_dir", "model.path", "model.make_vocab_divisible_by", "data.train", "data.eval"),
    *("parallel.tensor", "parallel.sequence", "rollout.tensor", "precision.params"),
    *("rollout.dtype", "rollout.max_num_seqs", "rollout.kv_cache_gib", "rollout.enforce_eager"),
    *("rollout.sleep_level", "rollout.max_prompt_tokens", "rollout.max_response_tokens"),
    *("batch.prompts_per_step", "batch.prompts_per_minibatch", "batch.tokens_per_microbatch"),
    # Its epochs are those of 32 prompts; the share of a step that a minibatch has stays.
    *("trainer.num_epochs", "trainer.num_steps"),
    *("data.min_pixels", "data.max_pixels", "mismatch_limits.abort_above", "logging.trackers"),
    "data.template_date",  # the day of the start, of every run
}


def rows_of(data: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """In the columns of the preset's data, each with a picture or a number of its own."""
    columns = data["columns"]
    rows = []
    for number in range(count):
        answer = str(1 + number % 2)
        row: dict[str, Any] = dict.fromkeys(columns["categories"], "1")
        if columns["answer"] == "solution":
            answer = rf"It is $\boxed{{{answer}}}$."
        if columns["answer"] == "emotion":
            answer = ("awe", "fear")[number % 2]
        row[columns["answer"]] = answer
        if columns["prompt"] is not None:
            row[columns["prompt"]] = f"<image>{number}" if sees(data) else f"{number}"
        if sees(data):
            image = {"bytes": png(56 + 28 * (number % 3), 56, number), "path": None}
            row["images" if columns["images"] == "auto" else columns["images"]] = [image]
        rows.append(row)
    return rows


def sees(data: Mapping[str, Any]) -> bool:
    return data["max_pixels"] is not None


def wordy(values: Mapping[str, Any]) -> str:
    data = values["data"]
    return " ".join(map(str, (data["system_prompt"], data["prompt_prefix"], data["prompt_suffix"])))


def make_answers_likely(weights: Path, tokens: list[int]) -> None:
    """The first number of each embedding, the same for all but these tokens, makes them likely:
    embeddings are tied to the head."""
    tensors = load_file(weights)
    (name,) = (key for key in tensors if key.endswith("embed_tokens.weight"))
    tensors[name][:, 0] = 0.1
    tensors[name][torch.tensor(tokens), 0] = 1.0
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """That of texts, and that of images and texts, by whether they see."""
    folder = tmp_path_factory.mktemp("models")
    options = argparse.Namespace(seed=0, layers=2, hidden=128, tower_hidden=32)
    # One text of all words: each of them becomes a token, and prompts stay short.
    words = [" ".join(wordy(preset(name)) for name in NAMES)]
    wordings = ANSWERS[:-1]
    write_untrained(folder / "seeing", words, options, wordings)
    tokenizer = make_tokenizer(words, wordings=wordings)
    tokenizer.save_pretrained(folder / "reading")
    make_model(tokenizer, options).float().save_pretrained(folder / "reading")
    for path in (folder / "seeing", folder / "reading"):
        vocabulary = json.loads((path / "tokenizer.json").read_text())
        ids = {one["content"]: one["id"] for one in vocabulary["added_tokens"]}
        make_answers_likely(path / "model.safetensors", [ids[answer] for answer in ANSWERS])
    return {True: folder / "seeing", False: folder / "reading"}


def preset(name: str, *more: str) -> dict[str, Any]:
    given = ("model.path=m", "data.train=t", "data.eval=e")
    return compose("config", [f"experiment=papers/{name}", *given, *more])


def is_of_method(row: str) -> bool:
    return all(word.startswith("method") for word in row.split())


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def miniature(name: str, row: Sequence[str], folder: Path, model: Path) -> list[str]:
    """The overrides that make it small, of keys of ``OF_TWO_CORES`` and of groups with them."""
    values = preset(name, *row)
    batch, data = values["batch"], values["data"]
    pq.write_table(pa.Table.from_pylist(rows_of(data, 40)[:32]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows_of(data, 40)[32:]), folder / "eval.parquet")
    minibatches = batch["prompts_per_step"] // batch["prompts_per_minibatch"]
    return [
        f"experiment=papers/{name}",
        *row,
        *("parallel=tp2", "precision=fp32", "rollout=vllm_cpu", "rollout.tensor=2"),
        f"run_dir={folder / 'run'}",
        f"model.path={model}",
        "model.make_vocab_divisible_by=32",
        *(f"data.{part}={folder / part}.parquet" for part in ("train", "eval")),
        f"batch.prompts_per_step={PROMPTS_PER_STEP}",
        f"batch.prompts_per_minibatch={PROMPTS_PER_STEP // minibatches}",
        *("batch.tokens_per_microbatch=4096", "trainer.num_epochs=1"),
        *("rollout.max_prompt_tokens=240", "rollout.max_response_tokens=4"),
        *(("data.min_pixels=3136", "data.max_pixels=12544") if sees(data) else ()),
        *("logging.trackers=[]", "mismatch_limits.abort_above=1e-4"),
    ]


# What the method of a preset does, seen in the numbers of a step.
Row = Mapping[str, float]


def damps_positives(alpha: float) -> Callable[[Row], None]:
    """A-GRAE: what is positive of advantages whose sum is 0 gets min(1, omega / alpha)."""

    def check(row: Row) -> None:
        factor = min(1.0, row["credit/omega"] / alpha)
        assert 0 < factor < 1
        positive = factor * row["credit/advantage_negative_sum"]
        assert row["credit/advantage_positive_sum"] == pytest.approx(positive, rel=1e-5)

    return check


def is_zscore(row: Row) -> None:
    assert row["credit/extreme_group_share"] > 0
    found = row["credit/extreme_advantage_abs_mean"]
    assert found == pytest.approx(row["credit/extreme_zscore_abs_mean"], rel=1e-6)


def is_no_zscore(row: Row) -> None:
    """Durian and MAPO: groups with one right or one wrong response get other advantages."""
    assert row["credit/extreme_group_share"] > 0
    found = row["credit/extreme_advantage_abs_mean"]
    assert found != pytest.approx(row["credit/extreme_zscore_abs_mean"], rel=1e-4)


def refills(row: Row) -> None:
    is_no_zscore(row)
    assert row["credit/all_correct_group_share"] == row["credit/none_correct_group_share"] == 0
    assert row["rollout/sampling_rounds"] >= 1


def is_asymmetric(row: Row) -> None:
    """APO: KL weights below 1 for right responses."""
    assert 0 < row["credit/kl_weight_mean"] < 1


SHOWS: dict[str, Callable[[Row], None]] = {
    "view_r1_3b": is_asymmetric,
    "a_grae_math_7b": damps_positives(1.0),
    "a_grae_geo3k_vl": damps_positives(0.5),
    "geo3k_3b": is_zscore,
    "durian_7b": is_no_zscore,
    "durian_dapo_7b": refills,
    "mapo_geo3k_g12": is_no_zscore,
    "mapo_emotion_g8": is_no_zscore,
}
NAMES = list(TABLE)
ALONE = [("", name) for name in NAMES]
# Rows that differ in more than the method have a launch each.
ALONE += [(row, name) for name, rows in ROWS.items() for row in rows if not is_of_method(row)]


@pytest.mark.parametrize(("row", "name"), ALONE)
def test_a_miniature_takes_two_steps(row, name, tmp_path, models):
    words = row.split()
    model = models[name != "a_grae_math_7b"]
    launch("megatron_rl.train", 2, miniature(name, words, tmp_path, model), 300)
    ran = json.loads((tmp_path / "run/config.json").read_text())
    wanted = dict(flat(validate(Config, preset(name, *words), name).model_dump(mode="json")))
    found = dict(flat(ran))
    differs = {key for key in wanted if found[key] != wanted[key]}
    assert differs <= OF_TWO_CORES, differs - OF_TWO_CORES
    for key, (printed, _) in TABLE[name]["values"].items():
        assert row or key in OF_TWO_CORES or found[key] == printed, key
    rows = toy.rows(tmp_path / "run")
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    for row in rows:
        wrong = {k: v for k, v in row.items() if v is None or not math.isfinite(v)}
        assert not wrong and all(map(metric, row)), wrong
    for row in rows[-2:]:
        check_step(row, ran)
        SHOWS[name](row)


@pytest.mark.parametrize("name", [name for name in NAMES if any(map(is_of_method, ROWS[name]))])
def test_rows_that_differ_in_their_method_take_two_steps(name, tmp_path, models):
    settings = miniature(name, [], tmp_path, models[name != "a_grae_math_7b"])
    settings.append("memory.offload=[]")  # the weights are looked at between two methods
    rows = [row for row in ROWS[name] if is_of_method(row)]
    check(two_steps_each(tmp_path / "out.jsonl", rows, settings))


def check_step(row: Row, ran: Mapping[str, Any]) -> None:
    """What every preset says of a step."""
    assert 0 < row["reward/accuracy"] < 1 and row["optim/grad_norm"] > 0
    assert row["mismatch/logprob_abs_diff_max"] <= 1e-4 and row["optim/skipped"] == 0
    assert (row["loss/kl"] > 0) == (ran["method"]["kl"]["coef"] > 0)
    optim = ran["optim"]
    updates = row["step"] * PROMPTS_PER_STEP // ran["batch"]["prompts_per_minibatch"]
    reached = min(1.0, updates / max(1, optim["warmup_steps"]))
    assert row["optim/learning_rate"] == pytest.approx(reached * optim["learning_rate"])
    reward = ran["reward"]
    total = reward["accuracy_weight"] * row["reward/accuracy"]
    if reward["format_weight"]:
        assert 0 < row["reward/part/format"] < 1
        total += reward["format_weight"] * row["reward/part/format"]
    assert row["reward/mean"] == pytest.approx(total, rel=1e-5)
