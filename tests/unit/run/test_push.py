"""hub.push: the export and its card in a local hub, and what becomes of a run when that fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from megatron_rl.config.rules.checks import check
from megatron_rl.errors import ConfigError
from megatron_rl.reporting.report import report
from megatron_rl.run.push import check_token, model_card, push_export
from megatron_rl.runtime.launch import World
from tests.hub_server import COMMIT, REPO, Hub, serving
from tests.unit.trainer.runs import WORLD, bandit_config, build_bandit

NAME = "me/tuned"
WEIGHTS = os.urandom(1000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "model").mkdir()
    with serving(tmp_path / "model") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # The other protocol of large files is compiled, and knows the real hub alone.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps. The bandit has no weights to export."""
    folder = tmp_path_factory.mktemp("finished")
    build_bandit(folder, "seed=3").run()
    export = folder / "run" / "export"
    export.mkdir(exist_ok=True)
    (export / "config.json").write_text("{}")
    (export / "model.safetensors").write_bytes(WEIGHTS)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def push(run: Path, world: World = WORLD) -> None:
    push_export(bandit_config(run, [f"hub.push={NAME}"]), world)


def test_the_export_its_card_and_its_curves_are_pushed(hub: Hub, run: Path) -> None:
    push(run)
    files = hub.pushed[NAME]
    assert files["model.safetensors"] == WEIGHTS
    assert sorted(files) == ["README.md", "config.json", "curves.png", "model.safetensors"]
    assert files["curves.png"] == (run / "curves.png").read_bytes()
    assert (hub.visibility[NAME], hub.tokens) == ("private", {"Bearer hf_secret"})
    push(run)  # the same command on a finished run
    assert hub.pushed[NAME] == files


def test_only_rank_0_of_a_run_that_has_ended_pushes(hub: Hub, run: Path) -> None:
    push(run, replace(WORLD, rank=1))
    (run / "requeue").write_text("2\n")
    push(run)
    assert not hub.pushed


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("denied", "401"),
        ("missing", "404"),
        ("busy", "503"),
        ("changed", "Error while uploading 'model.safetensors'"),
        pytest.param("cut", "peer closed", marks=pytest.mark.full),  # tried again for 20 s
    ],
)
def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(
    hub: Hub, run: Path, fault: str, says: str
) -> None:
    hub.fault = fault
    with pytest.raises(
        ValueError, match=f"^hub.push = {NAME}: the upload failed: .*{says}"
    ) as error:
        push(run)
    assert str(error.value).endswith(
        f"the run is finished; try again: hf upload --private {NAME} {run}/export ."
    )
    assert not hub.pushed.get(NAME) and not hub.large
    hub.fault = ""
    push(run)
    assert hub.pushed[NAME]["model.safetensors"] == WEIGHTS


@pytest.mark.full  # the library tries it again for half a minute
def test_weights_that_fail_are_pushed_by_the_command_of_the_message(hub: Hub, run: Path) -> None:
    hub.fault = "busy file"
    with pytest.raises(ValueError, match=r"Error while uploading 'model.safetensors'") as error:
        push(run)
    assert not hub.pushed[NAME]
    hub.fault = ""
    words = shlex.split(str(error.value).partition("try again: ")[2])
    setting = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    program = Path(sys.executable).with_name(words[0])
    subprocess.run([program, *words[1:]], env=os.environ | setting, check=True)
    assert hub.pushed[NAME]["model.safetensors"] == WEIGHTS
    assert b"# tuned" in hub.pushed[NAME]["README.md"]


def test_the_card_says_what_was_trained_from_what_and_how_it_went(run: Path) -> None:
    record = json.loads((run / "config.json").read_text())
    cache = f"/data/hub/models--{REPO.replace('/', '--')}/snapshots/{COMMIT}"
    record["model"]["path"] = cache
    record["data"]["train"] = ["hf:openai/gsm8k:main:train", "/data/mine/own.jsonl"]
    table = report(run / "metrics.jsonl")
    _, front, text = model_card(NAME, record, table).split("---\n", 2)
    head = yaml.safe_load(front)
    assert head["base_model"] == REPO and head["datasets"] == ["openai/gsm8k"]
    assert head["tags"] == ["megatron_rl", "reinforcement-learning", "grpo"]
    assert text.startswith("# tuned\n")
    _, results, curves, settings, _ = re.split(r"```(?:yaml)?\n|```$", text)
    assert results == f"{table}\n" and "held-out accuracy" in table
    assert "![Curves of the run](curves.png)" in curves
    told = yaml.safe_load(settings)
    assert told["base model"] == f"{REPO} at revision {COMMIT}"
    assert told["training data"] == ["hf:openai/gsm8k:main:train", "own.jsonl"]
    for key in ("seed", "batch", "optim", "method"):
        assert told[key] == record[key]
    assert told["versions"]["torch"] == record["versions"]["torch"]
    assert "/data" not in text


def test_what_cannot_be_pushed_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"hub.push = 'tuned': is no repository .*OWNER/NAME"):
        bandit_config(tmp_path, ["hub.push=tuned"])
    with pytest.raises(ConfigError, match=r"checkpoint.export_at_end=false leaves nothing to push"):
        check(bandit_config(tmp_path, [f"hub.push={NAME}", "checkpoint.export_at_end=false"]), 1)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=f"hub.push = {NAME}: no token .*set HF_TOKEN"):
        check_token(NAME)
    check_token(None)
