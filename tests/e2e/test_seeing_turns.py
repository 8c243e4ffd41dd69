"""Several turns about images on the real engines: policy, sampler and transformers agree on every
sampled token, whose positions go on behind the grid of an image."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.types import Image, Prompt
from tests.e2e.test_vision import REWARD, serving
from tests.e2e.toy import overrides, rows
from tests.e2e.turns import BOUND, PLUGIN, SETTINGS
from tests.launch import launch
from tests.numerics import seeing
from tests.unit.data.pictures import QUESTION, png

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
SIZES = ([(84, 84)], [(56, 168)], [(84, 112), (112, 56)], [])  # of the images of prompts
STOPS = "rollout.stop=[a,c,e,g,i,k,m,o,q,s,u,w,y,A,C,E,G,I,K,M,O,Q,S,U,W,Y]"  # a turn is short
CONTEXT = ("parallel=single", "parallel.context=2", "rollout.tensor=1")


def write(folder: Path, family: str) -> Path:
    """Model, data and plug-in."""
    seeing.write_model(folder / "model", family=family)
    lines = []
    for number, sizes in enumerate(SIZES * 2):
        names = [f"{number}_{place}.png" for place in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            (folder / name).write_bytes(png(*size, seed=number))
        prompt = "<image>" * len(sizes) + QUESTION + str(number)
        lines.append({"prompt": prompt, "answer": "a", "images": names})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "letters.py").write_text(PLUGIN)
    (folder / "reward.py").write_text(REWARD)
    return folder


def words(folder: Path, run_dir: Path, *more: str) -> list[str]:
    own = ("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=128", STOPS)
    own += ("env.name=letters", "model.make_vocab_divisible_by=32", "trainer.num_steps=2")
    own += (
        f"reward.function={folder / 'reward.py'}:score",
        "reward.verifier=auto",
        "reward.answer_pattern=null",
    )
    plugin = ["--plugin", str(folder / "letters.py")]
    return [*plugin, *overrides(folder, run_dir, *SETTINGS, *own, *more)]


@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [
        ("qwen2_5_vl", "tensor", ("parallel.sequence=true",)),
        ("qwen2_5_vl", "context", CONTEXT),
        ("qwen3_vl", "tensor", ("parallel.sequence=true",)),
        ("qwen3_vl", "pipeline", ("parallel=pp2", "rollout.tensor=1")),
    ],
)
def test_sampler_and_policy_agree_over_turns_about_images(
    tmp_path: Path, family: str, name: str, layout: Sequence[str]
) -> None:
    write(tmp_path, family)
    run_dir = tmp_path / name
    launch(
        "megatron_rl.train", 2, words(tmp_path, run_dir, "nonfinite.bundle_step=1", *layout), 400
    )
    for row in [row for row in rows(run_dir) if row["step"]]:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND and row["optim/grad_norm"] > 0
        assert row["environment/turns"] > 3
    bundle = run_dir / "nonfinite" / "step_000001"
    check_by_transformers(tmp_path / "model", bundle)


def test_a_server_continues_turns_as_the_engine_in_the_process(tmp_path: Path) -> None:
    """Bit for bit, also behind tokens of images that were sampled, which are none."""
    write(tmp_path, "qwen2_5_vl")
    found = []
    for source in ("servers", "colocated"):
        more = ("rollout.tensor=1", f"source={source}", "weight_sync.logprob_check_tolerance=1e-4")
        told = words(tmp_path, tmp_path / source, "nonfinite.bundle_step=1", *more)
        with serving(tmp_path, told) if source == "servers" else contextlib.nullcontext():
            launch("megatron_rl.train", 2, told, 400)
        (file,) = (tmp_path / source / "nonfinite" / "step_000001").rglob("batch.safetensors")
        found.append((load_file(file), rows(tmp_path / source)[1:]))
    (served, of_server), (own, of_engine) = found
    assert served.keys() == own.keys()
    assert all(torch.equal(served[name], own[name]) for name in own)
    names = ("loss/total", "optim/grad_norm", "environment/turns", "mismatch/logprob_abs_diff_max")
    assert [[row[name] for name in names] for row in of_server] == [
        [row[name] for name in names] for row in of_engine
    ]
    pad = VisionProcessor(tmp_path / "model").image_token_id
    lengths = (own["prompt_lengths"] + own["response_lengths"]).tolist()
    parts = zip(own["token_ids"].split(lengths), own["response_lengths"].tolist(), strict=True)
    assert any((whole[-length:] == pad).any() for whole, length in parts)


def ignoring_images(first: int) -> Any:
    """Planted: positions that count every token, from number ``first`` of a response on."""
    plain = seeing.hf_positions

    def positions(hf: Any, prompt: Sequence[int], length: int, *more: Any) -> Tensor:
        found = plain(hf, prompt, length, *more)
        begin = len(prompt) + first
        found[..., begin:] = torch.arange(begin, length)
        return found

    return positions


@torch.no_grad()
def check_by_transformers(path: Path, bundle: Path) -> None:
    """All that was sampled in the first step is as likely as the engine said; with positions of the
    later turns that leave the images out it is not."""
    (file,) = bundle.rglob("batch.safetensors")
    facts = json.loads((file.parent / "bundle.json").read_text())
    tensors = load_file(file)
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor = VisionProcessor(path)
    by_row = tensors["response_lengths"].tolist()
    lengths = (tensors["prompt_lengths"] + tensors["response_lengths"]).tolist()
    planted = 0
    for uid, found, whole, sampled, logprobs in zip(
        facts["uids"],
        facts["images"],
        tensors["token_ids"].split(lengths),
        tensors["sampled"].split(by_row),
        tensors["sampler_logprobs"].split(by_row),
        strict=True,
    ):
        ids, response = whole[: -len(sampled)], whole[-len(sampled) :].tolist()
        images = [Image(*one, file.parent / "images" / one[0]) for one in found]
        prompt = Prompt(uid, tuple(ids.tolist()), "", "", images=tuple(images))
        right = seeing.hf_logprobs(hf, prompt, response, processor)
        assert (right - logprobs)[sampled].abs().max() <= BOUND
        later = sampled & (sampled.cumprod(0) == 0)
        if images and later.any():
            planted += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(seeing, "hf_positions", ignoring_images(int(later.nonzero()[0])))
                wrong = seeing.hf_logprobs(hf, prompt, response, processor)
            assert (wrong - logprobs)[later].abs().max() > 100 * BOUND
    assert planted > 10
