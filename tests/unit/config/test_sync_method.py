"""Which way weights go by default: reshard where nothing has to be converted."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config

PATHS = ["model.path=-", "data.train=-", "data.eval=-"]
BF16 = "rollout.dtype=bfloat16"
RESHARD = "weight_sync.method=reshard"


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        ([], "reshard"),  # bfloat16 on both sides
        (["precision=fp32", "rollout=vllm_cpu"], "reshard"),
        (["precision=fp32", BF16], "gather"),
        (["rollout=vllm_fp8"], "gather"),
        (["rollout=vllm_fp8", RESHARD], "reshard"),
        (["precision=fp32", BF16, RESHARD], "reshard"),
        (["weight_sync.method=gather"], "gather"),
    ],
)
def test_auto_is_reshard_where_both_sides_have_one_dtype(overrides: list[str], method: str) -> None:
    config = validate(Config, compose("config", [*PATHS, *overrides]), "test")
    assert config.sync_method == method
