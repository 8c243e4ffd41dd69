"""The dry run: figures worked out by hand on a small model, every preset, and messages for layouts
that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.plan_sync import PRESETS, main

KEYS = {"bytes_sent", "bytes_local", "lower_bound", "peak_staging_bytes", "gather_bytes"}


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_config(folder: Path) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 4,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_figures_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """q, k, v, o, gate, up, down: 7 x 16 elements cut over tp=2; embedding and head 2 x 1024, cut;
    three norms of 4, whole. At two bytes each of two processes lacks (112 + 2048) / 2 x 2 = 2160
    bytes, holds as many and 24 of norms. Both send 2160 in one bucket and receive as many: 4320
    staged. Gather brings each process the same 2160. At 1 and 1 GB/s on one node: 2160e-9 s.
    """
    layouts = "--train tp=2 --rollout tp=1,dp=2 --nvlink-gb-s 1".split()
    got = figures(capsys, "--model", str(write_config(tmp_path)), *layouts)
    expected = {
        "bytes_sent": 4320,
        "bytes_local": 4368,
        "lower_bound": 4320,
        "peak_staging_bytes": 4320,
        "gather_bytes": 4320,
    }
    assert {key: got[key] for key in KEYS} == expected
    assert got["bytes_same_node"] == 4320 and got["seconds"] == got[
        "gather_seconds"
    ] == pytest.approx(2160e-9)


def test_disaggregated_rollout_receives_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """(112 + 2048 + 12) x 2 bytes, from two training processes to one rollout process on another
    node."""
    layouts = "--train tp=2 --rollout tp=1 --disaggregated --gpus-per-node 2".split()
    got = figures(capsys, "--model", str(write_config(tmp_path)), *layouts)
    assert got["bytes_across_nodes"] == got["lower_bound"] == 4344 and got["bytes_local"] == 0


OF_FULL_TIER = ("kimi-k2", "qwen3-next-80b", "qwen3.5-9b", "gpt-oss-20b", "glm-4.5", "32b", "72b")


@pytest.mark.parametrize(
    "model",
    [
        # Of sizes with the same kinds of layers one is in the core tier.
        pytest.param(name, marks=pytest.mark.full if name in OF_FULL_TIER else ())
        for name in sorted(set(PRESETS) - {"qwen2.5-7b", "phi-4"})
    ],
)
def test_large_models_are_planned_at_the_lower_bound(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got = figures(capsys, "--model", model, "--train", "tp=8,pp=4,dp=2", "--rollout", "tp=8,dp=8")
    assert set(got) >= KEYS
    assert got["bytes_sent"] == got["lower_bound"] < got["gather_bytes"] / 7.9
    assert got["peak_staging_bytes"] <= 4 * 256 * 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "qwen2.5-7b", "--train", "tp=8", "--rollout", "tp=8"),
            "parallel.tensor = 8: does not divide the model's 28 attention heads",
        ),
        (
            ("--model", "7b", "--train", "tp=8", "--rollout", "tp=4"),
            "--train has 8 processes, --rollout 4",
        ),
        (
            ("--model", "7b", "--train", "tp=8,xp=2", "--rollout", "tp=4"),
            "--train: 'xp=2' is not one of tp, pp",
        ),
        (("--model", "7b", "--train", "tp=0", "--rollout", "tp=4"), "--train: 'tp=0'"),
        (
            ("--model", "7b", "--train", "tp=\u00b2", "--rollout", "tp=4"),
            "--train: 'tp=\u00b2' is not one of tp, pp",
        ),
        (
            ("--model", "nowhere", "--train", "tp=1", "--rollout", "tp=1"),
            "--model nowhere: no preset and no HF directory",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--model", "qwen3-235b-a22b", "--train", "pp=4,tp=2,ep=2", "--rollout", "tp=8"]) == 0
    )
    shown = capsys.readouterr().out
    assert "first stage 23 layers, last stage 23" in shown and "lower bound across nodes" in shown
