"""Annealed temperatures with vLLM's own requests and batches: which row is divided by what."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from megatron_rl.annealing import Annealing
from megatron_rl.engine.logits_processors import ChangedLogits, ChangedRows, ChangedSlots
from megatron_rl.engine.sampling import NOT_CUT, extra_args, sampling_values, vllm_sampling
from megatron_rl.types import Sampling

ANNEALING = Annealing(1.5, 0.5, decay_tokens=4.0, plain_tokens=1)
OTHER = Annealing(1.2, 0.8, decay_tokens=9.0, plain_tokens=0)
CPU = torch.device("cpu")


def at(annealing: Annealing, position: int) -> float:
    return annealing.of_positions(torch.tensor([position])).item()


def params(annealing: Annealing | None, num_there: int = 0) -> SamplingParams:
    return vllm_sampling(Sampling(1, 8, annealing=annealing), 3, (2,), num_there)


def divisors(processed: torch.Tensor) -> list[float]:
    """Of logits that were 6 everywhere."""
    assert torch.equal(processed, processed[:, :1].expand_as(processed))
    return (6 / processed[:, 0]).tolist()


def test_a_request_says_its_temperatures_and_where_they_begin() -> None:
    (key,) = extra_args(Sampling(1, 8, annealing=ANNEALING), 5) or {}
    assert params(ANNEALING, 5).extra_args == {key: [1.5, 0.5, 4.0, 1.0, 5.0, *NOT_CUT]}
    assert params(None).extra_args is None
    assert sampling_values(Sampling(1, 8, annealing=ANNEALING), 3, ())["temperature"] == 1.0


def test_rows_follow_requests_as_they_come_move_and_go() -> None:
    rows = ChangedRows(None, CPU, False)
    first, second, third = [7], [7, 7], [7, 7, 7]  # sampled so far
    added = [
        (0, params(ANNEALING), None, first),
        (1, params(None), None, second),
        (2, params(OTHER, 4), None, third),
    ]
    rows.update_state(BatchUpdate(3, removed=[], added=added, moved=[]))
    wanted = [at(ANNEALING, 1), 1, at(OTHER, 7)]
    assert divisors(rows.apply(torch.full((3, 4), 6.0))) == pytest.approx(wanted)
    first.append(7)
    rows.update_state(None)
    wanted[0] = at(ANNEALING, 2)
    assert divisors(rows.apply(torch.full((3, 4), 6.0))) == pytest.approx(wanted)
    there = MoveDirectionality.UNIDIRECTIONAL
    rows.update_state(BatchUpdate(2, removed=[0], added=[], moved=[(2, 0, there)]))
    wanted = [at(OTHER, 7), 1]
    assert divisors(rows.apply(torch.full((2, 4), 6.0))) == pytest.approx(wanted)
    rows.update_state(BatchUpdate(1, removed=[0], added=[], moved=[(1, 0, there)]))
    logits = torch.full((1, 4), 6.0)
    assert torch.equal(rows.apply(logits.clone()), logits), "nothing is annealed any more"


def context(slots: list[int], positions: list[int]) -> LogitsContext:
    """Row i is of the request in ``slots[i]``, whose last token stands at ``positions[i]``."""
    mapping = torch.tensor(slots, dtype=torch.int32)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.zeros_like(mapping),
        input_ids=torch.zeros_like(mapping),
        pos=torch.tensor(positions),
        seq_lens_upper_bound_np=np.array(positions) + 1,
    )


def states_of_four() -> LogitsProcRequestState:
    prompts = torch.tensor([3, 5, 0, 4], dtype=torch.int32)
    return LogitsProcRequestState(
        device=CPU,
        max_num_reqs=4,
        vocab_size=4,
        all_token_ids=SimpleNamespace(),
        prompt_len=SimpleNamespace(gpu=prompts),
        prefill_len=SimpleNamespace(),
        total_len=SimpleNamespace(),
    )


def test_slots_are_used_again() -> None:
    slots = ChangedSlots(None, states_of_four())
    assert slots.add_request(0, params(ANNEALING))
    assert slots.add_request(3, params(OTHER, 4))
    assert not slots.add_request(1, params(None))
    slots.apply_staged_writes()
    # The last token of the prompt at 2, the third token of a response at 6, and a plain request.
    found = slots.apply(torch.full((3, 4), 6.0), context([0, 3, 1], [2, 6, 9]))
    assert divisors(found) == pytest.approx([1, at(OTHER, 7), 1])
    assert not slots.add_request(3, params(None))
    assert slots.add_request(1, params(ANNEALING))
    slots.apply_staged_writes()
    found = slots.apply(torch.full((2, 4), 6.0), context([3, 1], [6, 6]))
    assert divisors(found) == pytest.approx([1, at(ANNEALING, 2)])


def test_each_runner_gets_its_half() -> None:
    assert issubclass(ChangedLogits, RowProcessor) and issubclass(ChangedLogits, SlotProcessor)
    states = SimpleNamespace(max_num_reqs=2, device=CPU)
    new = SimpleNamespace(use_v2_model_runner=True)
    assert isinstance(ChangedLogits(new, states), ChangedSlots)
    old = SimpleNamespace(use_v2_model_runner=False)
    assert isinstance(ChangedLogits(old, CPU, False), ChangedRows)
