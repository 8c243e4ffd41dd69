"""Families whose layers differ, trained from a random start on the real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.e2e.toy import SIZES, overrides, rows, write_data, write_tokenizer
from tests.launch import launch

STEPS = 20
NATS = 1e-5


def write_glm(path: Path) -> None:
    """Three layers, the first one dense; the bias decides about experts too."""
    write_tokenizer(path)
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **SIZES | dict(num_hidden_layers=3),
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    )
    model = Glm4MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.normal_(0.0, 0.1)
    model.save_pretrained(path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=2", "parallel.sequence=true", "rollout.tensor=2"),
        ("parallel.tensor=1", "parallel.expert=2", "rollout.tensor=1"),
    ],
    ids=["tensor", "expert"],
)
def test_glm_learns_what_its_engine_samples(layout: tuple[str, ...], tmp_path: Path) -> None:
    """After every update the engine's logprobs of what it samples are those of the policy."""
    write_glm(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    more = (
        *layout,
        "method=grpo",
        f"trainer.num_steps={STEPS}",
        "optim.learning_rate=5e-3",
        "weight_sync.logprob_check_every=1",
    )
    launch("megatron_rl.train", 2, overrides(tmp_path, tmp_path / "run", *more), 600)
    steps: list[dict[str, Any]] = [row for row in rows(tmp_path / "run") if row["step"]]
    largest = max(row["mismatch/logprob_abs_diff_max"] for row in steps)
    print(f"largest |policy - engine| of {STEPS} steps: {largest:.1e}")
    assert len(steps) == STEPS and largest <= NATS
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2
