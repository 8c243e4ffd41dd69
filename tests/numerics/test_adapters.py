"""Adapters on real megatron-core, in many layouts, against transformers with adapters written by
hand (float32)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoints import peft_format
from megatron_rl.models import read_architecture
from megatron_rl.models.adapters import with_adapters
from tests import zoo
from tests.numerics.adapters_worker import (
    LORA,
    Case,
    compare,
    differentiated,
    other_base,
    reference,
)
from tests.numerics.small_policy import OVERLAPPED
from tests.ranks import call

ATTENTION = dict(targets=["attention"])
CORE = (
    Case("biases_tied_rslora", model="qwen2_tied", lora=dict(rslora=True)),
    Case("tp2_sp", 2, {"tensor": 2, "sequence": True}),
    Case("dp2_overlap", 2, OVERLAPPED),
    Case("experts_ep2", 2, {"expert": 2}, model="qwen3_moe", lora=ATTENTION),
)
FULL = (
    Case("one"),
    Case("tp2", 2, {"tensor": 2}),
    Case("tp2_attention", 2, {"tensor": 2}, lora=ATTENTION),
    Case("pp2", 2, {"pipeline": 2}),
    Case("pp2_tied", 2, {"pipeline": 2}, model="qwen2_tied"),
    Case("vpp", 2, {"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": True}),
    Case("cp2", 2, {"context": 2}),
    Case("run_again", 1, {"recompute": "full"}),
    Case("selective", 2, {"recompute": "selective", "tensor": 2, "sequence": True}),
    Case("deep_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="qwen3_vl"),
    Case("deep_experts_ep2", 2, {"expert": 2}, model="qwen3_vl_moe", lora=ATTENTION),
    Case("images_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="qwen2_5_vl"),
    Case("images_pp2", 2, {"pipeline": 2}, model="qwen2_5_vl"),
    Case("images_run_again", 2, {"recompute": "full"}, model="qwen2_5_vl_tied"),
    Case("experts_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="qwen3_moe", lora=ATTENTION),
    Case("qk_norm", 2, {"tensor": 2, "sequence": True}, model="qwen3"),
    Case("output_norms", 2, {"tensor": 2, "sequence": True}, model="gemma3"),
    Case("fused_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="phi3"),
    Case("fused_pp2", 2, {"pipeline": 2}, model="phi3"),
    Case("first_dense_ep2", 2, {"expert": 2}, model="glm4_moe", lora=ATTENTION),
    Case(
        "first_dense_tp2_sp",
        2,
        {"tensor": 2, "sequence": True},
        model="glm4_moe",
        lora=ATTENTION,
    ),
    Case("sinks_ep2", 2, {"expert": 2}, model="gpt_oss", lora=ATTENTION),
    Case("sinks_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="gpt_oss", lora=ATTENTION),
    Case("sinks_pp2", 2, {"pipeline": 2}, model="gpt_oss", lora=ATTENTION),
    Case("latent_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="deepseek_v3", lora=ATTENTION),
    Case("latent", model="deepseek_v3", lora=ATTENTION),
    Case("latent_pp2", 2, {"pipeline": 2}, model="deepseek_v3", lora=ATTENTION),
    Case("latent_ep2", 2, {"expert": 2}, model="deepseek_v3", lora=ATTENTION),
    Case("latent_cp2", 2, {"context": 2}, model="moonlight", lora=ATTENTION),
    Case("latent_dp2", 2, OVERLAPPED, model="moonlight", lora=ATTENTION),
    Case("delta", model="qwen3_next", lora=ATTENTION),
    Case("delta_pp2", 2, {"pipeline": 2}, model="qwen3_5"),
    Case("delta_ep2", 2, {"expert": 2}, model="qwen3_5_moe", lora=ATTENTION),
    Case("delta_cp2", 2, {"context": 2}, model="qwen3_next", lora=ATTENTION),
    Case("delta_tp2_sp", 2, {"tensor": 2, "sequence": True}, model="qwen3_next", lora=ATTENTION),
    Case("four_matrices", 2, {"tensor": 2, "sequence": True}, model="qwen3_5"),
    Case("delta_images", 2, {"tensor": 2, "sequence": True}, model="qwen3_5_vl"),
    Case("heads_norm", 2, {"tensor": 2, "sequence": True}, model="olmo3"),
)
BOUND = 2e-6  # relative, but of logits and logprobs, whose bound is in nats
NATS = 1e-5


@pytest.fixture(scope="module")
def answers(hf_models: Path, seeing_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of a case, its adapters in peft's format, and what transformers says about it."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def answer(name: str) -> tuple[Path, Path, dict[str, Any]]:
        case = next(case for case in (*CORE, *FULL) if case.name == name)
        path = (seeing_models if case.model in zoo.SEEING else hf_models) / case.model
        return path, root / name, reference(case, path, root / name)

    return answer


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CORE),
        *(pytest.param(case, id=case.name, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_adapters_equal_transformers(case: Case, answers: Any) -> None:
    """Logits, loss, gradients of A and B, a step of Adam, merged weights; adapters off; the base
    keeps its bits."""
    ranks = call(case.processes, compare, case, *answers(case.name))
    for figures in ranks:
        for key, value in figures.items():
            in_nats = key.startswith(("logits", "logprobs", "off"))
            assert value <= (NATS if in_nats else BOUND), f"{key}: {value}"


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {}),
        pytest.param("phi3", {}, marks=pytest.mark.full),
        pytest.param("glm4_moe", ATTENTION, marks=pytest.mark.full),
        pytest.param("moonlight", ATTENTION, marks=pytest.mark.full),
        pytest.param("qwen3_5", {}, marks=pytest.mark.full),
        pytest.param("qwen3_next", ATTENTION, marks=pytest.mark.full),
    ],
)
def test_checkpoint_of_another_base_is_refused(
    name: str, lora: dict[str, Any], hf_models: Path, tmp_path: Path
) -> None:
    other = zoo.save_tiny_model(name, tmp_path / "other", seed=8)
    folder = tmp_path / "checkpoints" / "step_000001"
    call(1, other_base, hf_models / name, other, folder, LORA | lora)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2_5_vl"])
def test_peft_reads_what_is_written(
    name: str, hf_models: Path, seeing_models: Path, tmp_path: Path
) -> None:
    """Where peft is installed: its model with the folder has the logits of the definition, and the
    folder that it saves in turn is taken."""
    peft = pytest.importorskip("peft")
    path = (seeing_models if name in zoo.SEEING else hf_models) / name
    wanted = reference(Case("peft", model=name), path, tmp_path / "adapter")
    folder = tmp_path / "adapter"
    model = peft.PeftModel.from_pretrained(zoo.tiny_model(name), folder, is_trainable=True)
    found = differentiated(name)(model.base_model.model)
    for got, logits in zip(found["logits"], wanted["logits"], strict=True):
        assert (got - logits).abs().max() <= NATS
    model.save_pretrained(tmp_path / "again")
    config = zoo.model_config(path, lora=LORA)
    arch = with_adapters(read_architecture(path)[0], config.lora)
    peft_format.check(tmp_path / "again", arch, config.lora)
