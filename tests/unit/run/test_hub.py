"""model.path of the hub, beside a local one: downloads, faults, and one commit for a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from huggingface_hub import constants

from megatron_rl.run.hub import fetch_weights, with_model
from megatron_rl.runtime.launch import World
from tests.hub_server import COMMIT, REPO, Hub, serving
from tests.ranks import call
from tests.unit.planning_of_7b import config

WORLD = World(rank=0, size=1, local_rank=0, launch_id="test")
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("[]")
    (model / "notes.bin").write_text("nobody reads it")
    (model / WEIGHTS).write_bytes(os.urandom(100_000))
    with serving(model) as hub:
        for name, value in settings(hub.url, tmp_path).items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def settings(url: str, folder: Path) -> dict[str, Any]:
    """What the library takes from HF_ENDPOINT and HF_HOME when it is imported."""
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    cache = str(folder / "cache")
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": cache,
        "HF_HUB_OFFLINE": False,
    }


def of(path: str, tmp_path: Path) -> Any:
    return config(f"model.path={path}", f"run_dir={tmp_path}/run")


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_checks_come_before_weights_and_nothing_comes_twice(hub: Hub, tmp_path: Path) -> None:
    found = with_model(of(REPO, tmp_path), WORLD)
    assert names(found.model.path) == ["config.json", "tokenizer.json"]
    assert Path(found.model.path).name == COMMIT
    fetch_weights(found, WORLD)
    assert names(found.model.path) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert sorted(hub.asked) == ["config.json", WEIGHTS, "tokenizer.json"]
    again = with_model(of(REPO, tmp_path), WORLD)
    fetch_weights(again, WORLD)
    assert again.model.path == found.model.path and len(hub.asked) == 3


def test_a_run_keeps_its_commit_when_the_branch_moves(hub: Hub, tmp_path: Path) -> None:
    first = with_model(of(REPO, tmp_path), WORLD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"path": first.model.path}}))
    hub.branch = "b" * 40
    hub.commits[hub.branch] = {"config.json": b'{"new": 1}'}
    assert with_model(of(REPO, tmp_path), WORLD).model.path == first.model.path
    other = with_model(of(REPO, tmp_path / "other"), WORLD)
    named = with_model(of(f"{REPO}@main", tmp_path), WORLD)
    assert Path(other.model.path).name == Path(named.model.path).name == hub.branch
    pinned = with_model(of(f"{REPO}@{COMMIT}", tmp_path / "other"), WORLD)
    assert pinned.model.path == first.model.path


def test_a_local_folder_comes_first(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    for path in (REPO, "./gone/model", "/gone/model", "model"):
        assert with_model(of(path, tmp_path), WORLD).model.path == path
    assert not hub.asked


def test_without_a_network_the_cache_is_enough(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = with_model(of(REPO, tmp_path), WORLD)
    fetch_weights(found, WORLD)
    for name, value in settings("http://127.0.0.1:9", tmp_path).items():
        monkeypatch.setattr(constants, name, value)
    again = with_model(of(REPO, tmp_path), WORLD)
    fetch_weights(again, WORLD)
    assert again.model.path == found.model.path


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing", "no such folder; as a model of the hub: not there; correct the name"),
        ("denied", "set HF_TOKEN for one that is private"),
        ("gated", "the hub asks for an agreement"),
        ("busy", r"not in the cache \(HF_HOME\), and the hub does not answer .*503"),
    ],
)
def test_what_the_hub_refuses_is_one_message(
    hub: Hub, tmp_path: Path, fault: str, says: str
) -> None:
    hub.fault = fault
    with pytest.raises(ValueError, match=f"^model.path = {REPO}: .*{says}"):
        with_model(of(REPO, tmp_path), WORLD)


def test_a_revision_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no revision v9 of it"):
        with_model(of(f"{REPO}@v9", tmp_path), WORLD)


@pytest.mark.parametrize(
    ("fault", "says"), [("busy file", "503"), ("changed", f"{WEIGHTS} has other bytes")]
)
def test_weights_that_fail_come_with_the_next_start(
    hub: Hub, tmp_path: Path, fault: str, says: str
) -> None:
    found = with_model(of(REPO, tmp_path), WORLD)
    hub.fault = fault
    with pytest.raises(ValueError, match=f"download failed .*{says}.*start again"):
        fetch_weights(found, WORLD)
    hub.fault = ""
    fetch_weights(found, WORLD)
    there = Path(found.model.path, WEIGHTS).read_bytes()
    assert there == hub.commits[COMMIT][WEIGHTS]


@pytest.mark.full  # the library tries it again for some seconds
def test_a_body_that_is_cut_off(hub: Hub, tmp_path: Path) -> None:
    found = with_model(of(REPO, tmp_path), WORLD)
    hub.fault = "cut"
    with pytest.raises(ValueError, match=r"download failed .*50000 bytes, expected 100000"):
        fetch_weights(found, WORLD)
    assert WEIGHTS not in names(found.model.path)


def both(url: str, folder: Path) -> str:
    for name, value in settings(url, folder).items():
        setattr(constants, name, value)
    rank = dist.get_rank()
    world = World(rank, 2, rank, "test", dist.group.WORLD)
    found = with_model(of(REPO, folder), world)
    fetch_weights(found, world)
    return found.model.path


def test_one_rank_of_a_machine_downloads(hub: Hub, tmp_path: Path) -> None:
    paths = call(2, both, hub.url, tmp_path)
    assert paths[0] == paths[1] and names(paths[0]) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert sorted(hub.asked) == ["config.json", WEIGHTS, "tokenizer.json"]
