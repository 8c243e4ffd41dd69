"""What is switched on for a CUDA device, or saves time or memory, computes what the plain way
does (two ranks)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy import layers, patches
from megatron_rl.policy import model as model_room
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.passes.attention import zigzag
from megatron_rl.types import SequenceBatch
from tests.numerics.policy_reference import make_batch, relative_error
from tests.ranks import on_ranks
from tests.zoo import of_all_rows, tiny_policy
from tools.replay.gradients import gathered_gradients

SEQUENCE: dict[str, Any] = {"tensor": 2, "sequence": True}
INTERLEAVED: dict[str, Any] = {"pipeline": 2, "virtual_pipeline": 2}
CLOSE = 2e-6
Figures = dict[str, Any]


def simple_loss(view: TokenView) -> LossOutput:
    loss = -(view.logprobs * torch.cos(view.index.float())).sum()
    return LossOutput(loss, {"largest_max": view.logprobs.detach().exp().sum()})


def cut(policy: MegatronPolicy, batch: SequenceBatch) -> list[list[int]]:
    """Micro-batches of very different lengths, one of them empty."""
    rows = list(range(batch.num_responses))[policy.ranks.data_rank :: policy.ranks.data]
    return [rows[:1], rows[1:], [], []][: max(2, 2 * policy.batching.rule.multiple)]


def figures(
    path: Path,
    layout: dict[str, Any],
    prepare: Callable[[MegatronPolicy], None] = lambda _: None,
    **more: Any,
) -> Figures:
    """Logprobs, loss and gradient of a policy of that layout."""
    policy = tiny_policy(path, layout, **more)
    prepare(policy)
    batch = make_batch()
    logprobs = of_all_rows(policy.score(LocalBatch(batch, cut(policy, batch)))).logprobs
    totals = policy.backward(LocalBatch(batch, cut(policy, batch)), simple_loss)
    gradient = {key: value.clone() for key, value in gathered_gradients(policy)}
    shards = {
        (shard.name, shard.start, shard.shape, shard.offset, shard.stride)
        for shard in policy.weight_shards()
    }
    weights = dict(policy.gathered_weights())
    policy.close()
    return dict(
        logprobs=logprobs,
        loss=totals.loss,
        gradient=gradient,
        metrics=totals.metrics,
        shards=shards,
        weights=weights,
    )


def equal(one: Figures, other: Figures) -> None:
    assert torch.equal(one["logprobs"], other["logprobs"])
    assert one["loss"] == other["loss"] and one["metrics"] == other["metrics"]
    different = [
        key
        for key, value in one["gradient"].items()
        if not torch.equal(value, other["gradient"][key])
    ]
    assert not different, different


def close(one: Figures, other: Figures) -> None:
    gap = float((one["logprobs"] - other["logprobs"]).abs().max())
    assert gap <= CLOSE, gap
    assert abs(one["loss"] - other["loss"]) <= CLOSE * abs(other["loss"])
    error = relative_error(one["gradient"], other["gradient"])
    assert error <= CLOSE, error


@on_ranks(2, timeout=250)
def test_random_states_of_cuda_change_no_number(hf_models: Path):
    """A sequence-parallel forward enters fork() at the embedding and around the layers. What is
    installed where there is a CUDA device lets it through, and changes no number."""
    plain = figures(hf_models / "qwen2", SEQUENCE)
    real = patches.apply

    def apply_with_cuda() -> None:
        # As a new process: nobody has made a tracker yet.
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            real()

    with mock.patch.object(patches, "apply", apply_with_cuda):
        equal(figures(hf_models / "qwen2", SEQUENCE), plain)


@on_ranks(2, timeout=250)
def test_micro_batches_of_one_length_ask_for_none(hf_models: Path):
    """Micro-batches packed to one length: no stage asks for a length, and the results are those of
    micro-batches of their own lengths, but for rounding."""
    question = (
        "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes"
    )

    def refuse(*_: Any) -> None:
        raise AssertionError("a length was asked for")

    for name, layout in (("qwen2", {"pipeline": 2}), ("llama", INTERLEAVED)):
        own = figures(hf_models / name, layout)
        with (
            mock.patch.object(model_room, "one_length", lambda: True),
            mock.patch(question, refuse),
        ):
            same = figures(hf_models / name, layout)
        close(same, own)


@contextlib.contextmanager
def fused(**kernels: bool) -> Iterator[None]:
    """The named kernels of megatron switched on."""
    plain = model_room.fused_kernels

    def chosen(arch: Any) -> dict[str, Any]:
        return plain(arch) | kernels

    with mock.patch.object(model_room, "fused_kernels", chosen):
        yield


def packed_rotary(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int, interleaved: bool
) -> Tensor:
    """What the kernel of Transformer Engine documents: sequence i of all context ranks lies between
    boundaries i and i + 1, and begins with row 0 of the angles."""
    assert not interleaved
    assert (
        cu_seqlens.dtype == torch.int32
        and cu_seqlens[0] == 0
        and cu_seqlens[-1] == len(t) * cp_size
    )
    assert freqs.dtype == torch.float32 and freqs.shape[1:] == (1, 1, t.shape[-1])
    lengths = cu_seqlens.diff().tolist()
    assert max(lengths) <= len(freqs)
    positions = torch.cat([zigzag(length, cp_rank, cp_size) for length in lengths])
    angles = freqs[positions, 0]
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@on_ranks(2, timeout=250)
def test_the_fused_rotary_kernel_gets_what_it_needs(hf_models: Path):
    """The fused rotary kernel gets what it needs, context parallel too, and is refused with prompts
    that are shared."""
    kernel = mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", packed_rotary)
    whole = {"share_prompts": False}
    for name, layout in (("llama", {}), ("llama", {"context": 2}), ("qwen3", SEQUENCE)):
        plain = figures(hf_models / name, layout, **whole)
        with kernel, fused(apply_rope_fusion=True):
            close(figures(hf_models / name, layout, **whole), plain)
    refused = pytest.raises(AssertionError, match="shared prompts need the rotary angles unfused")
    with kernel, fused(apply_rope_fusion=True), refused:
        figures(hf_models / "llama", {"tensor": 2})


@on_ranks(2, timeout=250)
def test_swiglu_in_one_function(hf_models: Path):
    """megatron's SwiGLU in one function is the same function."""
    for name, layout in (("llama", SEQUENCE), ("qwen3_moe", {"expert": 2})):
        plain = figures(hf_models / name, layout)
        with fused(bias_activation_fusion=True):
            close(figures(hf_models / name, layout), plain)


class NumberedLinear(torch.nn.Module):
    """The interface of Transformer Engine's layer of several matrices: parameters ``weight0``,
    ``weight1``, ... (and ``bias0``, ...), tokens of expert i behind those of expert i - 1."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        pg_collection: Any,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.returns_bias = bias and skip_bias_add
        ranks = pg_collection.expt_tp.size()
        if _["tp_comm_buffer_name"] == "fc1":
            output_size //= ranks
        else:
            input_size //= ranks
        for number in range(num_gemms):
            shapes = {"weight": (output_size, input_size)} | (
                {"bias": (output_size,)} if bias else {}
            )
            for name, shape in shapes.items():
                value = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
                spread = config.expert_model_parallel_size > 1
                cut = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
                value.allreduce = cut and not spread
                self.register_parameter(f"{name}{number}", value)
        self.num_gemms = num_gemms

    def forward(self, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        of = dict(self.named_parameters())
        parts = [part @ of[f"weight{i}"].T for i, part in enumerate(tokens.split(sizes))]
        biases = [of[key] for key in of if key.startswith("bias")]
        if self.returns_bias:
            return torch.cat(parts), biases
        return torch.cat([sum(pair) for pair in zip(parts, biases or [0.0] * len(parts))]), None


@contextlib.contextmanager
def grouped_experts() -> Iterator[None]:
    """megatron's grouped experts on the layer above."""
    plain = layers.layer_spec

    def with_groups(*arguments: Any, **words: Any) -> Any:
        layer, norm = plain(*arguments, **words)
        linear = GroupedMLPSubmodules(linear_fc1=NumberedLinear, linear_fc2=NumberedLinear)
        experts = layer.submodules.mlp.keywords["submodules"]
        experts.experts = partial(TEGroupedMLP, submodules=linear)
        return layer, norm

    with (
        mock.patch.object(layers, "layer_spec", with_groups),
        fused(bias_activation_fusion=True, moe_grouped_gemm=True),
    ):
        yield


GPT_OSS: tuple[str, dict[str, Any]] = ("gpt_oss", {"expert": 2})


@on_ranks(2, timeout=250)
def test_grouped_experts(hf_models: Path):
    """Grouped experts hold the checkpoint's tensors and compute what single ones do."""
    split = {"tensor": 2, "sequence": True, "expert_tensor": 2}
    for name, layout in (
        ("qwen3_moe", {"expert": 2}),
        ("mixtral", {}),
        ("mixtral", split),
        GPT_OSS,
    ):
        plain = figures(hf_models / name, layout)
        named: list[str] = []
        with grouped_experts():
            found = figures(
                hf_models / name,
                layout,
                lambda policy, named=named: named.extend(item.name for item in policy.held),
            )
        assert any(".mlp.experts.linear_fc1.weight0" in name for name in named) and not any(
            "local_experts" in name for name in named
        )
        assert found["shards"] == plain["shards"]
        stored = load_file(hf_models / name / "model.safetensors")
        assert stored.keys() == found["weights"].keys()
        assert all(torch.equal(stored[key], found["weights"][key]) for key in stored)
        close(found, plain)


class NoFp8:
    """What megatron asks of Transformer Engine when it runs a module again, answered for a run
    without FP8."""

    is_fp8_enabled = staticmethod(lambda: False)

    @staticmethod
    def context(**_: Any) -> Any:
        return contextlib.nullcontext()


@pytest.mark.full
@on_ranks(2, timeout=250)
def test_recomputed_modules(hf_models: Path):
    """Modules that are run again give the same gradient, bit for bit; a norm that is run again adds
    the parts of its input's gradient in another order."""
    for name, layout in (
        ("qwen2", SEQUENCE),
        ("qwen3_moe", {"expert": 2}),
        ("llama", {"pipeline": 2}),
    ):
        equal(
            figures(hf_models / name, {**layout, "recompute": "selective"}),
            figures(hf_models / name, layout),
        )
    asked = {
        "FP8GlobalStateManager": NoFp8,
        "activation_recompute_forward": NoFp8.context,
        "fp8_autocast": NoFp8.context,
    }
    ran: list[str] = []
    real = megatron_random.CheckpointWithoutOutput.checkpoint

    def noted(self: Any, function: Any, *arguments: Any) -> Any:
        ran.append(getattr(function, "__name__", type(function).__name__))
        return real(self, function, *arguments)

    modules = mock.patch.object(
        model_room, "selective_modules", lambda *_, **__: ["moe_act", "layernorm"]
    )
    with grouped_experts():
        plain = figures(hf_models / "qwen3_moe", {"expert": 2})
        with (
            modules,
            mock.patch.multiple(megatron_random, create=True, **asked),
            mock.patch.object(megatron_random.CheckpointWithoutOutput, "checkpoint", noted),
        ):
            again = figures(hf_models / "qwen3_moe", {"expert": 2, "recompute": "selective"})
        assert torch.equal(again["logprobs"], plain["logprobs"])
        close(again, plain)
    assert {"bias_act_func", "RMSNorm"} <= set(ran), ran
