"""What vLLM raises while it is built becomes a message with our key; the texts are vLLM's own."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, field_validator

from megatron_rl.engine.requirements import building
from tests.unit.engine.test_engine_calls import config


def said(error: Exception, *overrides: str) -> str:
    rollout = config("rollout=vllm_cpu", *overrides).rollout
    with pytest.raises(ValueError) as raised, building("/m", rollout):
        raise error
    assert raised.value.__cause__ is error
    return str(raised.value)


class Settings(BaseModel):
    quantization: str

    @field_validator("quantization")
    @classmethod
    def known(cls, value: str) -> str:
        raise ValueError("Cannot find any of ['desc_act'] in the model's quantization config.")


def refused_by_pydantic() -> Exception:
    with pytest.raises(ValueError) as raised:
        Settings(quantization="gptq")
    return raised.value


def test_a_cache_that_is_too_small_names_our_key_and_the_need():
    text = (
        "To serve at least one request with the model's max seq len (10), (0.02 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.01 GiB). Try increasing "
        "`gpu_memory_utilization`"
    )
    sizes = ["rollout.max_prompt_tokens=8", "rollout.max_response_tokens=2"]
    message = said(ValueError(text), "rollout.kv_cache_gib=0.01", *sizes)
    assert message.startswith("rollout.kv_cache_gib = 0.01: leaves no room")
    assert "one sequence of 10 tokens (0.02 GiB are needed); raise it" in message
    assert "gpu_memory_utilization" not in message
    text = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    assert "rollout.kv_cache_gib = 0.01" in said(ValueError(text), "rollout.kv_cache_gib=0.01")


def test_the_dump_of_a_validator_becomes_one_sentence():
    assert (
        said(refused_by_pydantic())
        == "model.path = /m: vLLM cannot serve this model with the settings of rollout.*: Cannot"
        " find any of ['desc_act'] in the model's quantization config; correct the setting, or"
        " use another model"
    )


def test_shared_memory_is_named():
    text = (
        "Insufficient space in /dev/shm for shm ring buffer: 24 MiB required, 12 MiB free. Increase"
        " /dev/shm (e.g. --shm-size or --ipc=host)."
    )
    message = said(RuntimeError(text))
    assert "24 MiB required, 12 MiB free; enlarge it (containers: --shm-size" in message


def test_a_fault_passes():
    with pytest.raises(RuntimeError, match=r"^boom$"), building("/m", config().rollout):
        raise RuntimeError("boom")
