"""Top-k and top-p as a logits processor: what is kept, by hand and beside vLLM's own, in which
rows, and what a response says of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from megatron_rl.engine.logits_processors import ChangedRows, ChangedSlots, truncate_
from megatron_rl.engine.request_tracking import kept_tokens, with_places
from megatron_rl.engine.requests import check_request
from megatron_rl.engine.sampling import NOT_ANNEALED, sampling_values, vllm_sampling
from megatron_rl.types import Completion, Prompt, Sampling
from tests.numerics.rollout_models import engine_config
from tests.unit.engine.test_annealed import ANNEALING, CPU, at, context, states_of_four

INF = math.inf
# Of the ids 2, 3, 0, 1 at temperature 1 the probabilities are 8/15, 4/15, 2/15 and 1/15.
LOGITS = torch.tensor([2.0, 1.0, 4.0, 3.0, 1.0]).mul(math.log(2))
LOGITS[4] = -INF


def params(**cut: float) -> SamplingParams:
    return vllm_sampling(Sampling(1, 8, with_kept=bool(cut), **cut), 3, (2,))


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature", "wanted"),
    [
        pytest.param(3, 1.0, 1.0, [0, 2, 3], id="top-k"),
        pytest.param(4, 0.7, 1.0, [2, 3], id="top-p: 8/15 does not reach it, 12/15 does"),
        pytest.param(4, 0.5, 1.0, [2], id="top-p: the first reaches it"),
        pytest.param(2, 0.65, 1.0, [2], id="of the top-k: 2/3 and 1/3"),
        pytest.param(9, 1.0, 1.0, [0, 1, 2, 3], id="more than there are"),
        pytest.param(4, 0.7, 0.5, [2], id="at temperature 1/2 the first has 0.75 alone"),
        pytest.param(1, 0.01, 1.0, [2], id="at least one"),
    ],
)
def test_what_is_kept_by_hand(
    top_k: int, top_p: float, temperature: float, wanted: list[int]
) -> None:
    limits = torch.tensor([[top_k, top_p, temperature], [0, 1, 1]], dtype=torch.float64)
    found = truncate_(torch.stack([LOGITS, LOGITS]), limits, top_k)
    assert kept(found[:1]) == [wanted]
    assert torch.equal(found[0, wanted], LOGITS[wanted])
    assert torch.equal(found[1], LOGITS), "a row that is not cut"


def test_ties_stay_within_the_bound() -> None:
    limits = torch.tensor([[3, 1.0, 1.0]], dtype=torch.float64)
    assert len(kept(truncate_(torch.zeros(1, 8), limits, 3))[0]) == 3


def test_without_ties_it_is_vllms_own() -> None:
    draw = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(64, 200, generator=draw)
    top_k = torch.randint(1, 60, (64,), generator=draw)
    top_p = torch.rand(64, generator=draw) * 0.9 + 0.05
    limits = torch.stack([top_k.double(), top_p.double(), torch.ones(64).double()], 1)
    found = truncate_(logits.clone(), limits, 59)
    assert torch.equal(found, apply_top_k_top_p(logits.clone(), top_k, top_p))


def test_a_request_says_its_limits_and_vllm_cuts_nothing_itself() -> None:
    one = params(top_k=3, top_p=0.5)
    assert list((one.extra_args or {}).values()) == [[*NOT_ANNEALED, 3.0, 0.5, 1.0]]
    assert (one.top_k, one.top_p, one.logprobs) in ((0, 1.0, 3), (-1, 1.0, 3))
    native = sampling_values(Sampling(1, 8, top_k=3, top_p=0.5), 3, ())
    assert (native["top_k"], native["top_p"], native["logprobs"]) == (3, 0.5, 0)


def test_rows_follow_requests_as_they_come_move_and_go() -> None:
    rows = ChangedRows(None, CPU, False)
    added = [
        (0, params(top_k=1), None, []),
        (1, params(), None, []),
        (2, params(top_k=2, temperature=0.5), None, []),
    ]
    rows.update_state(BatchUpdate(3, removed=[], added=added, moved=[]))
    logits = LOGITS.repeat(3, 1)
    assert kept(rows.apply(logits.clone())) == [[2], [0, 1, 2, 3], [2, 3]]
    there = MoveDirectionality.UNIDIRECTIONAL
    rows.update_state(BatchUpdate(2, removed=[0], added=[], moved=[(2, 0, there)]))
    assert kept(rows.apply(logits[:2].clone())) == [[2, 3], [0, 1, 2, 3]]
    rows.update_state(BatchUpdate(1, removed=[0], added=[], moved=[(1, 0, there)]))
    assert torch.equal(rows.apply(logits[:1].clone()), logits[:1])


def test_slots_are_used_again() -> None:
    slots = ChangedSlots(None, states_of_four())
    assert slots.add_request(0, params(top_k=2))
    # This runner divides by the temperature afterwards.
    assert slots.add_request(3, params(top_k=4, top_p=0.7, temperature=0.5))
    assert not slots.add_request(1, params())
    slots.apply_staged_writes()
    logits = LOGITS.repeat(3, 1)
    found = slots.apply(logits.clone(), context([0, 3, 1], [2, 6, 9]))
    assert kept(found) == [[2, 3], [2], [0, 1, 2, 3]]
    assert not slots.add_request(3, params())
    slots.apply_staged_writes()
    assert kept(slots.apply(logits[:1].clone(), context([3], [6]))) == [[0, 1, 2, 3]]


def test_what_is_kept_follows_from_annealed_logits() -> None:
    """At position 6 the temperature is 0.5: the first token alone reaches 0.54 of the probability,
    which at temperature 1 takes two."""
    cut = Sampling(1, 8, top_k=4, top_p=0.54, with_kept=True)
    both = [replace(cut, annealing=ANNEALING), cut]
    rows = ChangedRows(None, CPU, False)
    added = [(row, vllm_sampling(one, 3, (2,)), None, [7] * 6) for row, one in enumerate(both)]
    rows.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
    slots = ChangedSlots(None, states_of_four())
    for slot, one in enumerate(both):
        assert slots.add_request(slot, vllm_sampling(one, 3, (2,)))
    slots.apply_staged_writes()
    for found in (
        rows.apply(LOGITS.repeat(2, 1)),
        slots.apply(LOGITS.repeat(2, 1), context([0, 1], [8, 10])),
    ):
        assert kept(found) == [[2], [2, 3]]
        assert found[0, 2].item() == pytest.approx(LOGITS[2].item() / at(ANNEALING, 6))


IDS = np.array([[7, 7, 3, 9], [3, 7, 3, 9]], dtype=np.int32)
HALF = math.log(0.5)
LOGPROBS = np.array([[0.0, 0.0, -INF, -INF], [HALF, HALF, HALF, -INF]])


def test_kept_tokens_by_hand() -> None:
    assert kept_tokens(IDS, LOGPROBS, "p").tolist() == [[7, -1, -1], [7, 3, -1]]


def test_most_likely_tokens_by_hand() -> None:
    """Of an engine: the sampled token, then the most likely ones, one more than is wanted. Of a
    server: no token twice, the sampled one first. Token 9 is none of the two, token 3 is."""
    of_engine = np.array([[9, 7, 3, 5], [3, 7, 3, 5]], dtype=np.int32)
    of_server = np.array([[9, 9, 7, 3], [3, 3, 7, 5]], dtype=np.int32)
    logprob = {7: -0.5, 3: -1.0, 5: -2.0, 9: -3.0}
    assert sampling_values(Sampling(1, 8, num_likely=2), 3, ())["logprobs"] == 3
    for ids in (of_engine, of_server):
        drawn = Completion(ids[:, 0].tolist(), (-3.0, -1.0), False, 0)
        found = with_places(drawn, ids, np.vectorize(logprob.get)(ids), 2, "p")
        assert list(found.likely or ()) == [7, 3, 7, 3] and found.kept is None
        assert list(found.sampler_likely_logprobs or ()) == [-0.5, -1.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({(1, 0): 9}, r"p: token 9 \(number 1 of a response\) was not drawn from the 2 tokens"),
        ({(0, 0): 4}, r"p: token 4 \(number 0 of a response\) was not drawn from the 1 tokens"),
    ],
)
def test_a_token_that_was_not_kept_is_named(change: dict, words: str) -> None:
    ids = IDS.copy()
    for place, token in change.items():
        ids[place] = token
    with pytest.raises(RuntimeError, match=words):
        kept_tokens(ids, LOGPROBS, "p")


def test_a_sampler_that_keeps_more_than_it_says_is_found() -> None:
    logprobs = LOGPROBS.copy()
    logprobs[1, 1:3] -= 0.1
    with pytest.raises(RuntimeError, match=r"whose mass is 0\.9048"):
        kept_tokens(IDS, logprobs, "p")


def test_an_engine_that_was_not_built_for_it_refuses() -> None:
    prompt = Prompt("p", (1, 2), "", "")
    wanted = Sampling(1, 8, top_k=5, with_kept=True)
    with pytest.raises(ValueError, match="the 5 tokens that the sampler keeps are wanted"):
        check_request(prompt, wanted, engine_config())
    check_request(prompt, wanted, engine_config(top_k=5))
