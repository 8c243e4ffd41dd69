"""What can fail is said before engines are built: room on the disk, a checkpoint of another model,
keys of services."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.checkpoints import directory, facts
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.engine import requirements
from megatron_rl.models import read_architecture
from megatron_rl.run import preflight
from megatron_rl.run.start import ResumePoint
from megatron_rl.runtime import disk
from tests.e2e.toy import write_large_config, write_model
from tests.zoo import configured


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def config(*overrides: str) -> Config:
        common = [
            f"model.path={tmp_path / 'model'}",
            "data.train=t",
            "data.eval=e",
            f"run_dir={tmp_path / 'run'}",
            "precision=fp32",
        ]
        values = compose("config", [*common, "model.make_vocab_divisible_by=1", *overrides])
        return validate(Config, values, "test")

    return config


def check(config: Config, start: ResumePoint | None = None, *, reference: bool = False) -> None:
    preflight.check_before_build(config, start or ResumePoint(None, 0), reference)


def test_the_room_for_a_checkpoint_and_the_export_is_looked_at_before(
    config, tmp_path, monkeypatch, caplog
):
    write_large_config(tmp_path / "model")
    arch, _ = read_architecture(tmp_path / "model")
    parameters = facts.num_parameters(arch, 1)
    assert 72e9 < parameters < 73e9
    bf16 = ["precision=bf16"]
    needed = parameters * (2 + 4 + 4 + 4) + parameters * 2
    monkeypatch.setattr(disk, "free_bytes", lambda folder: needed - 1)
    said = (
        r"run_dir = .*run: no space left .* one checkpoint takes 10\d\d.\d\d GB and the export 14\d"
    )
    with pytest.raises(ValueError, match=said) as caught:
        check(config(*bf16))
    assert "are free there; delete files, or give a run_dir on another disk" in str(caught.value)
    check(config(*bf16, "checkpoint.export_at_end=false"))
    assert "checkpoint.keep = 2 will fill the disk" in caplog.text
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 4 * needed)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        check(config(*bf16), reference=True)
    assert caplog.text == ""


def test_an_engine_that_cannot_be_built_is_refused(config, tmp_path, monkeypatch):
    write_large_config(tmp_path / "model")
    old = SimpleNamespace(name="vllm", version="0.25.1")
    monkeypatch.setattr(requirements, "distributions", lambda name: [old] * (name == "vllm"))
    with pytest.raises(ValueError, match=r"rollout: vllm 0\.25\.1 is installed"):
        check(config())


def checkpoint(tmp_path: Path, **changes: object) -> Path:
    arch, _ = read_architecture(write_model(tmp_path / "model"))
    run = configured(tmp_path / "model", "precision=fp32")
    info = facts.describe(arch, run.model, run.precision, run.parallel, reference=False)
    path = tmp_path / "checkpoints" / "step_000001"
    (directory.begin(path) / "weights").write_bytes(b"x")
    directory.finish(path, info | changes)
    return path


@pytest.mark.parametrize(
    ("changes", "overrides", "reference", "why"),
    [
        ({}, ["precision=bf16"], False, "precision.params is 'float32' there and 'bfloat16' here"),
        (
            {},
            ["parallel.distributed_optimizer=false"],
            False,
            "parallel.distributed_optimizer is True there",
        ),
        ({}, [], True, "it holds no reference weights"),
        ({"format": 0}, [], False, "format is 0 there and 1 here"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_manifest(
    config, tmp_path, changes, overrides, reference, why
):
    start = ResumePoint(checkpoint(tmp_path, **changes), 1)
    with pytest.raises(ValueError, match=f"step_000001 does not fit this run: .*{why}"):
        check(config(*overrides), start, reference=reference)


def test_a_checkpoint_that_fits_passes(config, tmp_path):
    check(config(), ResumePoint(checkpoint(tmp_path), 1))
