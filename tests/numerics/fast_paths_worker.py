"""torchrun program (2 processes): what is switched on for a CUDA device, or saves time or memory,
against the plain way. Arguments: a folder for the models, names of checks (none: all)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.policy import cpu
from megatron_rl.policy import model as model_room
from megatron_rl.policy.attention import zigzag
from megatron_rl.policy.held_boxes import held_boxes
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import LossOutput, SequenceBatch, TokenView
from tests.numerics import models
from tests.numerics.policy_reference import make_batch, relative_error
from tests.numerics.policy_worker import build

FOLDER = Path(sys.argv[1])
SEQUENCE: dict[str, Any] = {"tensor": 2, "sequence": True}
INTERLEAVED: dict[str, Any] = {"pipeline": 2, "virtual_pipeline": 2}
CLOSE = 2e-6
Figures = dict[str, Any]


def model(name: str) -> Path:
    path = FOLDER / name
    if dist.get_rank() == 0 and not path.is_dir():
        models.save(name, path)
    dist.barrier()
    return path


def simple_loss(view: TokenView) -> LossOutput:
    loss = -(view.logprobs * torch.cos(view.index.float())).sum()
    return LossOutput(loss, {"largest_max": view.logprobs.detach().exp().sum()})


def cut(policy: MegatronPolicy, batch: SequenceBatch) -> list[list[int]]:
    """Micro-batches of very different lengths, one of them empty."""
    rows = list(range(batch.num_responses))[policy.data_parallel_rank :: policy.data_parallel_size]
    return [rows[:1], rows[1:], [], []][: max(2, 2 * policy.microbatch_multiple)]


def figures(name: str, layout: dict[str, Any], prepare: Callable[[MegatronPolicy], None] = lambda _: None) -> Figures:
    """Logprobs, loss and gradient of a policy of that layout."""
    policy = build(model(name), layout)
    prepare(policy)
    batch = make_batch()
    logprobs = policy.logprobs(batch, cut(policy, batch)).logprobs
    totals = policy.backward(batch, cut(policy, batch), simple_loss)
    gradient = {key: value.clone() for key, value in policy.gathered_gradients()}
    boxes = {(box.tensor, box.start, box.shape, box.offset, box.stride) for box in held_boxes(policy.held, policy.arch)}
    weights = dict(policy.gathered_weights())
    policy.close()
    return dict(logprobs=logprobs, loss=totals.loss, gradient=gradient, metrics=totals.metrics, boxes=boxes, weights=weights)


def equal(one: Figures, other: Figures) -> None:
    assert torch.equal(one["logprobs"], other["logprobs"])
    assert one["loss"] == other["loss"] and one["metrics"] == other["metrics"]
    different = [key for key, value in one["gradient"].items() if not torch.equal(value, other["gradient"][key])]
    assert not different, different


def close(one: Figures, other: Figures) -> None:
    gap = float((one["logprobs"] - other["logprobs"]).abs().max())
    assert gap <= CLOSE, gap
    assert abs(one["loss"] - other["loss"]) <= CLOSE * abs(other["loss"])
    error = relative_error(one["gradient"], other["gradient"])
    assert error <= CLOSE, error


def random_states() -> None:
    """A sequence-parallel forward enters fork() at the embedding and around the layers. What is
    installed where there is a CUDA device lets it through, and changes no number."""
    plain = figures("qwen2", SEQUENCE)
    real = cpu.apply

    def apply_with_cuda() -> None:
        # As a new process: nobody has made a tracker yet.
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            real()

    with mock.patch.object(cpu, "apply", apply_with_cuda):
        equal(figures("qwen2", SEQUENCE), plain)


def pipeline_lengths() -> None:
    """Micro-batches packed to one length: no stage asks for a length, and the results are those of
    micro-batches of their own lengths, but for rounding."""
    question = "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes"

    def refuse(*_: Any) -> None:
        raise AssertionError("a length was asked for")

    for name, layout in (("qwen2", {"pipeline": 2}), ("llama", INTERLEAVED)):
        own = figures(name, layout)
        with mock.patch.object(model_room, "one_length", lambda: True), mock.patch(question, refuse):
            same = figures(name, layout)
        close(same, own)


@contextlib.contextmanager
def fused(**kernels: bool) -> Iterator[None]:
    """The named kernels of megatron switched on."""
    plain = model_room.fused_kernels

    def chosen(experts: bool) -> dict[str, Any]:
        return plain(experts) | kernels

    with mock.patch.object(model_room, "fused_kernels", chosen):
        yield


def packed_rotary(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """What the kernel of Transformer Engine documents: sequence i of all context ranks lies between
    boundaries i and i + 1, and begins with row 0 of the angles."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == len(t) * cp_size
    assert freqs.dtype == torch.float32 and freqs.shape[1:] == (1, 1, t.shape[-1])
    lengths = cu_seqlens.diff().tolist()
    assert max(lengths) <= len(freqs)
    positions = torch.cat([zigzag(length, cp_rank, cp_size) for length in lengths])
    angles = freqs[positions, 0]
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def rotary() -> None:
    """The fused rotary kernel gets what it needs, context parallel too, and is refused with prompts
    that are shared."""
    kernel = mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", packed_rotary)
    whole = mock.patch.object(MegatronPolicy, "shares_prompts", False)
    for name, layout in (("llama", {}), ("llama", {"context": 2}), ("qwen3", SEQUENCE)):
        with whole:
            plain = figures(name, layout)
        with whole, kernel, fused(apply_rope_fusion=True):
            close(figures(name, layout), plain)
    with kernel, fused(apply_rope_fusion=True):
        try:
            figures("llama", {"tensor": 2})
        except AssertionError as error:
            assert "shared prompts need the rotary angles unfused" in str(error)
        else:
            raise AssertionError("shared prompts were not refused")
        finally:
            model_room.parallel_state.destroy_model_parallel()


def activation() -> None:
    """megatron's SwiGLU in one function is the same function."""
    for name, layout in (("llama", SEQUENCE), ("qwen3_moe", {"expert": 2})):
        plain = figures(name, layout)
        with fused(bias_activation_fusion=True):
            close(figures(name, layout), plain)


class NumberedLinear(torch.nn.Module):
    """The interface of Transformer Engine's layer of several matrices: parameters ``weight0``, ``weight1``, ..., tokens of expert i
    behind those of expert i - 1."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        ranks = pg_collection.expt_tp.size()
        if _["tp_comm_buffer_name"] == "fc1":
            output_size //= ranks
        else:
            input_size //= ranks
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)
        self.num_gemms = num_gemms

    def forward(self, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, None]:
        parts = zip(tokens.split(sizes), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


@contextlib.contextmanager
def grouped_experts() -> Iterator[None]:
    """megatron's grouped experts on the layer above."""
    plain = model_room.layer_spec

    def with_groups(*arguments: Any) -> Any:
        spec = plain(*arguments)
        linear = MLPSubmodules(linear_fc1=NumberedLinear, linear_fc2=NumberedLinear)
        for layer in spec.layer_specs:
            layer.submodules.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=linear)
        return spec

    with mock.patch.object(model_room, "layer_spec", with_groups), fused(bias_activation_fusion=True, moe_grouped_gemm=True):
        yield


def experts() -> None:
    """Grouped experts hold the checkpoint's tensors and compute what single ones do."""
    split = {"tensor": 2, "sequence": True, "expert_tensor": 2}
    for name, layout in (("qwen3_moe", {"expert": 2}), ("mixtral", {}), ("mixtral", split)):
        plain = figures(name, layout)
        named: list[str] = []
        with grouped_experts():
            found = figures(name, layout, lambda policy, named=named: named.extend(item.name for item in policy.held))
        assert any(".mlp.experts.linear_fc1.weight0" in name for name in named) and not any("local_experts" in name for name in named)
        assert found["boxes"] == plain["boxes"]
        stored = load_file(model(name) / "model.safetensors")
        assert stored.keys() == found["weights"].keys()
        assert all(torch.equal(stored[key], found["weights"][key]) for key in stored)
        close(found, plain)


class NoFp8:
    """What megatron asks of Transformer Engine when it runs a module again, answered for a run without FP8."""

    is_fp8_enabled = staticmethod(lambda: False)

    @staticmethod
    def context(**_: Any) -> Any:
        return contextlib.nullcontext()


def recomputed() -> None:
    """Modules that are run again give the same gradient, bit for bit; a norm that is run again adds the parts of its input's gradient
    in another order."""
    for name, layout in (("qwen2", SEQUENCE), ("qwen3_moe", {"expert": 2}), ("llama", {"pipeline": 2})):
        equal(figures(name, {**layout, "recompute": "selective"}), figures(name, layout))
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

    modules = mock.patch.object(model_room, "selective_modules", lambda *_, **__: ["moe_act", "layernorm"])
    with grouped_experts():
        plain = figures("qwen3_moe", {"expert": 2})
        with (
            modules,
            mock.patch.multiple(megatron_random, create=True, **asked),
            mock.patch.object(megatron_random.CheckpointWithoutOutput, "checkpoint", noted),
        ):
            again = figures("qwen3_moe", {"expert": 2, "recompute": "selective"})
        assert torch.equal(again["logprobs"], plain["logprobs"])
        close(again, plain)
    assert {"bias_act_func", "RMSNorm"} <= set(ran), ran


CHECKS: dict[str, Callable[[], None]] = {
    "random_states": random_states,
    "pipeline_lengths": pipeline_lengths,
    "rotary": rotary,
    "activation": activation,
    "experts": experts,
    "recomputed": recomputed,
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CHECKS:
        CHECKS[name]()
        if dist.get_rank() == 0:
            print(f"OK {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
