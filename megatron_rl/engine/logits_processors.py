"""What vLLM does to logits that its own sampling parameters cannot say: a temperature that falls
within a response, and top-k and top-p with the kept tokens known and at most top_k.

vLLM has two model runners, each with an interface of its own for this: the one of CPUs names a
request by its row of logits, the one of GPUs by a slot. Both call it before their own top-k and
top-p and before the logprobs that are returned, which are those of the changed logits.

vLLM's own top-k keeps all ties with the k-th logit, and says what it kept in one of its model
runners alone. This one breaks ties, and everything behind it, draws and returned logprobs alike,
finds the tokens that are left out at -inf.
"""

from abc import ABCMeta
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from megatron_rl.annealing import temperatures
from megatron_rl.engine.sampling import NOT_ANNEALED, NOT_CUT, OF_REQUEST, PLAIN_FOREVER

# Columns of what a request says, see ``sampling.extra_args``.
_ANNEALED = slice(0, 5)
_CUT = slice(5, 8)
_PLAIN_TOKENS, _TOP_K, _TEMPERATURE = 3, 5, 7
_UNCHANGED = [*NOT_ANNEALED, *NOT_CUT]


def _wanted(params: SamplingParams) -> list[float] | None:
    """What ``sampling.extra_args`` wrote; None of other requests."""
    return (params.extra_args or {}).get(OF_REQUEST)


def _changed_(
    logits: Float[Tensor, "n v"],
    on_host: Float[Tensor, "m 8"],
    wanted: Float[Tensor, "n 8"],
    num_tokens: Int[Tensor, " n"],
) -> Float[Tensor, "n v"]:
    """Annealed first: what is kept follows from the logits at their temperature.

    Args:
        on_host: all that ``wanted`` may hold, so that the device is not asked what to do.
        wanted: of each row.
        num_tokens: sampled so far.
    """
    if (on_host[:, _PLAIN_TOKENS] < PLAIN_FOREVER).any():
        start, end, decay_tokens, plain_tokens, num_there = wanted[:, _ANNEALED].unbind(1)
        positions = num_tokens + num_there
        logits.div_(temperatures(positions, start, end, decay_tokens, plain_tokens)[:, None])
    most = int(on_host[:, _TOP_K].max())
    return truncate_(logits, wanted[:, _CUT], most) if most else logits


def truncate_(
    logits: Float[Tensor, "n v"], limits: Float[Tensor, "n 3"], most: int
) -> Float[Tensor, "n v"]:
    """Sets the logits that top-k and then top-p leave out to -inf, and returns ``logits``.

    Top-p keeps the fewest of the most likely tokens whose probability, among the top-k, reaches it.

    Args:
        limits: top_k (0: the row stays as it is), top_p, and the temperature to divide by.
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


class ChangedRows(RowProcessor):
    """In the model runner of CPUs."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        # By row: what it says, and its sampled tokens, a list that grows with the response.
        self._requests: dict[int, tuple[list[float], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._request)

    @staticmethod
    def _request(
        params: SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> tuple[list[float], list[int]] | None:
        wanted = _wanted(params)
        return None if wanted is None else (wanted, sampled)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._requests:
            return logits
        rows = [_UNCHANGED] * len(logits)
        num_tokens = [0] * len(logits)
        for row, (wanted, sampled) in self._requests.items():
            rows[row] = wanted
            num_tokens[row] = len(sampled)
        on_host = torch.tensor(rows, dtype=torch.float64)
        on_host[:, _TEMPERATURE] = 1  # these logits are divided by it already
        counts = torch.tensor(num_tokens, device=self._device)
        return _changed_(logits, on_host, on_host.to(self._device), counts)


class ChangedSlots(SlotProcessor):
    """In the model runner of GPUs."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        # Slots of requests that have ended keep what they said until they are used again.
        self._slots = torch.tensor([_UNCHANGED] * req_states.max_num_reqs, dtype=torch.float64)
        self._on_device = self._slots.to(req_states.device)
        self._has_changed = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        wanted = _wanted(sampling_params)
        self._slots[req_idx] = torch.tensor(wanted or _UNCHANGED, dtype=torch.float64)
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
        return _changed_(logits, self._slots, self._on_device[slots], num_tokens)


class ChangedLogits:
    """What an engine is given: ``ChangedRows`` or ``ChangedSlots``. Which of its runners vLLM takes
    is known when its configuration is made."""

    def __new__(cls, vllm_config: Any, *place: Any) -> Any:
        kind = ChangedSlots if vllm_config.use_v2_model_runner else ChangedRows
        return kind(vllm_config, *place)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from this process, which has checked them."""


# Each runner requires a class of its own interface.
ABCMeta.register(RowProcessor, ChangedLogits)
ABCMeta.register(SlotProcessor, ChangedLogits)
