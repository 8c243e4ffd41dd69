"""A temperature that falls within a response, as vLLM samples it: a logits processor.

vLLM has two model runners, each with an interface of its own for these: the one of CPUs names a
request by its row of logits, the one of GPUs by a slot. Both divide the logits before top-k, top-p
and the logprobs that are returned; the temperature of the request is 1.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from megatron_rl.annealing import temperatures
from megatron_rl.engine.sampling import ANNEALED

# Of a request that is not annealed: 1 at every position.
_PLAIN = [1.0, 1.0, 1.0, float("inf"), 0.0]


def _wanted(params: SamplingParams) -> list[float] | None:
    """What ``sampling.annealed_request`` wrote; None of other requests."""
    return (params.extra_args or {}).get(ANNEALED)


def _divide_(logits: Tensor, wanted: Tensor, num_tokens: Tensor) -> None:
    """``wanted``: of each row, as ``annealed_request`` has it; ``num_tokens``: sampled so far."""
    start, end, decay_tokens, plain_tokens, num_there = wanted.unbind(1)
    positions = num_tokens + num_there
    logits.div_(temperatures(positions, start, end, decay_tokens, plain_tokens)[:, None])


class AnnealedRows(RowProcessor):
    """Annealed temperatures in the model runner of CPUs."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, tuple[list[float], list[int]]] = {}  # by row

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._request)

    @staticmethod
    def _request(
        params: SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> tuple[list[float], list[int]] | None:
        """``sampled`` grows with the response."""
        wanted = _wanted(params)
        return None if wanted is None else (wanted, sampled)

    def apply(self, logits: Tensor) -> Tensor:
        if self._requests:
            rows = [_PLAIN] * len(logits)
            num_tokens = [0] * len(logits)
            for row, (wanted, sampled) in self._requests.items():
                rows[row] = wanted
                num_tokens[row] = len(sampled)
            table = torch.tensor(rows, dtype=torch.float64, device=self._device)
            _divide_(logits, table, torch.tensor(num_tokens, device=self._device))
        return logits


class AnnealedSlots(SlotProcessor):
    """Annealed temperatures in the model runner of GPUs."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._slots = torch.tensor([_PLAIN] * req_states.max_num_reqs, dtype=torch.float64)
        self._on_device = self._slots.to(req_states.device)
        self._has_changed = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        wanted = _wanted(sampling_params)
        self._slots[req_idx] = torch.tensor(wanted or _PLAIN, dtype=torch.float64)
        self._has_changed = True
        return wanted is not None

    def apply_staged_writes(self) -> None:
        if self._has_changed:
            # The device is not waited for: memory that is not pinned has been read on return.
            self._on_device.copy_(self._slots, non_blocking=True)
            self._has_changed = False

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots = ctx.expanded_idx_mapping.long()
        # The prompt is after its last token at position prompt_len - 1, where the first response
        # token is drawn.
        num_tokens = ctx.pos + 1 - self._states.prompt_len.gpu[slots]
        _divide_(logits, self._on_device[slots], num_tokens)
        return logits


class AnnealedLogits:
    """What an engine is given: ``AnnealedRows`` or ``AnnealedSlots``. Which of its runners vLLM
    takes is known when its configuration is made."""

    def __new__(cls, vllm_config: Any, *place: Any) -> Any:
        is_slots = vllm_config.use_v2_model_runner
        return AnnealedSlots(vllm_config, *place) if is_slots else AnnealedRows(vllm_config, *place)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from this process, which has checked them."""


# Each runner requires a class of its own interface.
ABCMeta.register(RowProcessor, AnnealedLogits)
ABCMeta.register(SlotProcessor, AnnealedLogits)
