"""Names replaced inside megatron-core, each with its reason: most do not work without CUDA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import token_dispatcher

from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.passes.latent_attention import WholeLinear
from megatron_rl.policy.passes.linear_attention import HAS_KERNELS, STAND_INS


@dataclass(frozen=True)
class Patch:
    """When ``needed()``, ``module.name`` becomes ``replacement``, whether it exists or not."""

    module: Any
    name: str
    reason: str
    needed: Callable[[], bool]
    replacement: Any


def _without_cuda() -> bool:
    return not torch.cuda.is_available()


def _maybe_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _cpu_rng_state(device: Any = -1, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


_rotary_by_boundaries = rope_utils._apply_rotary_pos_emb_thd


def _rotary(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,  # its old name; no caller passes it
) -> torch.Tensor:
    rest = (rotary_interleaved, mla_rotary_interleaved, mscale)
    # Angles of every token are in its place already, unless its rank has a part of the tokens.
    if cp_group.size() == 1 and len(freqs) == len(t):
        return rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs, *rest).squeeze(1)
    return _rotary_by_boundaries(t, cu_seqlens, freqs, *rest, cp_group)


PATCHES = (
    Patch(
        layers,
        "_grad_accum_fusion_available",
        "Transformer Engine's layers add to main_grad themselves, but the head is megatron's own"
        " layer, which is refused without apex although its forward is never called",
        lambda: this_machine().transformer_engine is not None,
        True,
    ),
    Patch(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        "split sizes of the all-to-all stay tensors when they are on the CPU already; the"
        " collective wants numbers",
        _without_cuda,
        _maybe_numpy,
    ),
    Patch(
        multi_latent_attention,
        "Linear",
        "latent attention takes classes that it knows by name for the matrices that are not cut;"
        " that of this package stands in for Transformer Engine's",
        lambda: this_machine().transformer_engine is None,
        WholeLinear,
    ),
    Patch(
        rope_utils,
        "_apply_rotary_pos_emb_thd",
        "where angles are those of every token (images, shared prompts) megatron fetches the"
        " boundaries of the sequences one by one, for query and key of each layer",
        lambda: True,
        _rotary,
    ),
    *(
        Patch(
            module,
            name,
            "the gated delta net takes its kernels from flash-linear-attention, and is refused"
            " without it; torch's operations stand in",
            lambda: not HAS_KERNELS,
            value,
        )
        for module, name, value in STAND_INS
    ),
    Patch(
        megatron_random,
        "_get_cuda_rng_state",
        "activation recomputation saves the CUDA random state; without CUDA the state is the"
        " CPU one",
        _without_cuda,
        _cpu_rng_state,
    ),
    Patch(
        megatron_random,
        "_set_cuda_rng_state",
        "activation recomputation restores the CUDA random state; without CUDA calls would queue"
        " forever",
        _without_cuda,
        _set_cpu_rng_state,
    ),
)


ABSENT = object()
# What each name was before it was first replaced.
ORIGINALS: dict[Patch, Any] = {}


def apply() -> None:
    """Installs what this machine needs; may be called again.

    On every machine it installs a random-state tracker whose fork() does nothing, which is an
    official option. Dropout is 0 and weights are never drawn, so no state is needed; megatron's own
    tracker, to which no states are added, would raise on a CUDA device at the first fork() of a
    sequence-parallel forward. Layers of Transformer Engine get a tracker only when its
    is_initialized() is true, which it never is for this one.
    """
    for patch in PATCHES:
        if patch.needed():
            ORIGINALS.setdefault(patch, getattr(patch.module, patch.name, ABSENT))
            setattr(patch.module, patch.name, patch.replacement)
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
