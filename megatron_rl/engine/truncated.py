"""Top-k and top-p as a logits processor, so that the kept tokens are known and at most top_k.

vLLM's own keeps all ties with the k-th logit, and says what it kept in one of its model runners
alone. This one breaks ties, and everything behind it, draws and returned logprobs alike, finds the
tokens that are left out at -inf.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from megatron_rl.engine.sampling import TRUNCATED

_WHOLE = [0.0, 1.0, 1.0]  # of a request whose vocabulary is not cut


def _limits(params: SamplingParams) -> list[float] | None:
    """What ``sampling.extra_args`` wrote; None of other requests."""
    return (params.extra_args or {}).get(TRUNCATED)


def truncate_(
    logits: Float[Tensor, "n v"], limits: Float[Tensor, "n 3"], most: int
) -> Float[Tensor, "n v"]:
    """Sets the logits that top-k and then top-p leave out to -inf, and returns ``logits``.

    Top-p keeps the fewest of the most likely tokens whose probability, among the top-k, reaches it.

    Args:
        limits: top_k (0: the row stays as it is), top_p, and the temperature that the logits will
            be divided by.
        most: no top_k is larger.
    """
    top_k, top_p, temperature = limits.split(1, dim=1)
    largest, columns = logits.topk(min(most, logits.shape[1]), dim=1)
    is_whole = top_k == 0
    is_kept = (torch.arange(largest.shape[1], device=logits.device) < top_k) | is_whole
    scaled = (largest.double() / temperature).masked_fill(~is_kept, -torch.inf)
    probabilities = scaled.softmax(1)
    mass_before = probabilities.cumsum(1) - probabilities
    is_kept &= (mass_before < top_p) | (top_p >= 1)
    logits.masked_fill_(~is_whole, -torch.inf)
    return logits.scatter_(1, columns, largest.masked_fill(~is_kept, -torch.inf))


class TruncatedRows(RowProcessor):
    """In the model runner of CPUs."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, list[float]] = {}  # by row

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, lambda params, *_: _limits(params))

    def apply(self, logits: Tensor) -> Tensor:
        if not self._requests:
            return logits
        # These logits are divided by the temperature already.
        rows = [_WHOLE] * len(logits)
        for row, (top_k, top_p, _) in self._requests.items():
            rows[row] = [top_k, top_p, 1.0]
        most = int(max(top_k for top_k, *_ in rows))
        limits = torch.tensor(rows, dtype=torch.float64, device=self._device)
        return truncate_(logits, limits, most)


class TruncatedSlots(SlotProcessor):
    """In the model runner of GPUs."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._slots = torch.tensor([_WHOLE] * req_states.max_num_reqs, dtype=torch.float64)
        self._on_device = self._slots.to(req_states.device)
        self._has_changed = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        limits = _limits(sampling_params)
        self._slots[req_idx] = torch.tensor(limits or _WHOLE, dtype=torch.float64)
        self._has_changed = True
        return limits is not None

    def apply_staged_writes(self) -> None:
        if self._has_changed:
            self._on_device.copy_(self._slots)
            self._has_changed = False

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        # Read on the host, where slots of requests that have ended may raise it.
        most = int(self._slots[:, 0].max())
        limits = self._on_device[ctx.expanded_idx_mapping.long()]
        return truncate_(logits, limits, most) if most else logits


class TruncatedLogits:
    """What an engine is given: see ``annealed.AnnealedLogits``."""

    def __new__(cls, vllm_config: Any, *place: Any) -> Any:
        kind = TruncatedSlots if vllm_config.use_v2_model_runner else TruncatedRows
        return kind(vllm_config, *place)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from this process, which has checked them."""


# Each runner requires a class of its own interface.
ABCMeta.register(RowProcessor, TruncatedLogits)
ABCMeta.register(SlotProcessor, TruncatedLogits)
