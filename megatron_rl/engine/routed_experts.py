"""The experts that the engine's routers chose for the tokens of a response.

vLLM returns them with its newer model runner, which needs Triton: on GPUs. On a CPU it has the
older one, which does not; there ``SlotExperts`` keeps them beside the cache of keys and values.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from megatron_rl.models.experts import not_given, packed_experts

if TYPE_CHECKING:
    from vllm import LLM

RETURNED = {"enable_return_routed_experts": True}
Experts = Int[np.ndarray, "tokens layers k"]


class TokensOf(NamedTuple):
    """Whose experts are wanted."""

    num_tokens: int  # of the prompt and the response so far
    width: int  # bytes of the experts of each
    what: str  # for messages


def arguments_to_return() -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` to return experts; none where ``SlotExperts`` keeps them."""
    from vllm.distributed.aux_output_connector import worker
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return {}
    # Only the first rank of a tensor group would collect them, and the scheduler of another fails
    # without: vLLM has one scheduler for a group, here each rank has its own.
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    return RETURNED


class SlotExperts:
    """Of all tokens whose keys and values the cache of a worker holds, at the same places: thus
    also of a prompt that was computed for another response."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        model = runner.model_config
        layers, k = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self._batch = runner.input_batch
        num_slots = runner.kv_cache_config.num_blocks * self._table.block_size
        # Padding has slot -1: the last row is nobody's.
        self._dtype = torch.uint8 if model.get_num_experts() <= 256 else torch.int16
        self._experts = torch.zeros(num_slots + 1, layers, k, dtype=self._dtype)
        bind_routed_experts_capturer(runner.model, self)

    @property
    def _table(self) -> Any:
        return self._batch.block_table.block_tables[0]

    def capture(self, layer_id: int, topk_ids: Int[Tensor, "tokens k"]) -> None:
        """Called by the router of each layer in every forward."""
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping
        if slots:  # a warm-up has none
            of_tokens = next(iter(slots.values()))
            self._experts[of_tokens, layer_id] = topk_ids.to(self._dtype)

    def read(self, name: str, num_tokens: int) -> Experts | None:
        """Of the first tokens of a request that the last step of the engine worked on; None of
        another, as of one that waits for room in the cache."""
        row = self._batch.req_id_to_index.get(name)
        if row is None:
            return None
        size = self._table.block_size
        block, place = np.divmod(np.arange(num_tokens), size)
        slots = self._table.block_table.np[row, block].astype(np.int64) * size + place
        return self._experts[torch.from_numpy(slots)].numpy()


class ExpertReader:
    """Brings the experts of responses into the bytes in which they travel."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._are_returned = llm.llm_engine.vllm_config.aux_output_config.enabled
        if not self._are_returned:
            llm.collective_rpc("keep_experts")

    def of_ended(
        self, name: str, tokens: TokensOf, returned: Experts | None
    ) -> UInt8[np.ndarray, "num_tokens width"]:
        """Of a response that the last step has ended, and of its prompt.

        Args:
            name: vLLM's.
            returned: what vLLM returned for it.
        """
        if not self._are_returned:
            returned = self._kept(name, tokens.num_tokens - 1)
        return packed_rows(returned, tokens)

    def of_open(self, name: str, tokens: TokensOf) -> UInt8[np.ndarray, "num_tokens width"]:
        """Of a response that has not ended: of the tokens that have been computed; none where it
        waits for room in the cache."""
        states = self._llm.llm_engine.output_processor.request_states
        if self._are_returned:
            chunks = states[name].routed_experts_chunks
            found = np.concatenate(chunks) if chunks else None
        else:
            # All or nothing: engines on a CPU compute no prompt in pieces (``arguments``).
            found = self._kept(name, tokens.num_tokens - 1)
        if found is None:
            return not_given(tokens.num_tokens, tokens.width)
        rows = packed_rows(found, tokens._replace(num_tokens=len(found) + 1))
        return np.concatenate([rows, not_given(tokens.num_tokens - len(rows), tokens.width)])

    def _kept(self, name: str, num_tokens: int) -> Experts | None:
        return self._llm.collective_rpc("kept_experts", args=(name, num_tokens))[0]


def packed_rows(found: Experts | None, tokens: TokensOf) -> UInt8[np.ndarray, "num_tokens width"]:
    """``found`` in the bytes of ``models.experts``. The last token was sampled and never an input,
    so it has none.

    Raises:
        RuntimeError: these are no choices of a router.
    """
    # vLLM has all layers, with zeros for the first ones (fewer than half) that have no experts.
    if found is not None:
        num_bytes = math.ceil(tokens.width / math.prod(found.shape[1:]))
        found = found[:, -(tokens.width // (found.shape[2] * num_bytes)) :]
    # A router chooses k different experts. Arrays that nobody has written are zeros.
    num_inputs = tokens.num_tokens - 1
    problem = ""
    if found is None:
        problem = "no experts"
    elif len(found) < num_inputs:
        problem = f"experts of {len(found)} of {num_inputs} tokens"
    elif not found.any() or (found[..., :1] == found[..., 1:2]).any():
        problem = "zeros in the place of experts"
    if found is None or problem:
        raise RuntimeError(
            f"{tokens.what}: vLLM returned {problem}: its record of them does not work for this"
            " model, or these kernels; set rollout.router_replay=old_policy or none"
        )
    rows = not_given(tokens.num_tokens, tokens.width)
    numbers = torch.from_numpy(found[:num_inputs].reshape(num_inputs, -1).astype(np.int64))
    rows[:-1] = packed_experts(numbers, num_bytes).numpy()
    return rows
