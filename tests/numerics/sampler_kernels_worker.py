"""Kernels of the sampler that vLLM uses on GPUs, against plain formulas. One ``OK`` line per case.

Run by triton_interpreter.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.prompt_logprob import (
    compute_prompt_logprobs_with_chunking,
    get_prompt_logprobs_token_ids,
)

from tests.numerics.rollout_models import run_cases

# More than two blocks of the sampling kernel, and no multiple of one.
VOCAB = 2500
WORD = 0xFFFFFFFF


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def requests(*states: int) -> Tensor:
    """The place of each row's request among all requests."""
    return torch.tensor(states, dtype=torch.int32)


def rotated(value: int, shift: int) -> int:
    return (value << shift | value >> (32 - shift)) & WORD


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86_32 of 32-bit words, seed 0."""
    value = 0
    for word in words:
        key = rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        value = (rotated(value ^ key, 13) * 5 + 0xE6546B64) & WORD
    value ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ value >> shift) * factor & WORD
    return value


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Noise of each token, [size]: -log(-log(1 - u)) with u in (0, 1) from the hash."""
    noise = []
    for token in range(size):
        uniform = (murmur3([seed & WORD, seed >> 32 & WORD, position, token]) + 0.5) / 2.0**32
        noise.append(-math.log(-math.log1p(-uniform)))
    return torch.tensor(noise, dtype=torch.float64)


def sample(
    logits: Tensor, states: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> list[int]:
    return gumbel_sample(
        logits, states, temperature, seeds, positions, apply_temperature=False, is_drafting=False
    ).tolist()


def temperature() -> None:
    """Logits are divided once, in float32; those of temperatures 0 and 1 stay as they are."""
    logits = normal(4, VOCAB) * 5
    temperatures = torch.tensor([0.7, 1.0, 0.0, 1.5])
    states = requests(3, 0, 1, 2)
    divisors = torch.tensor([1.5, 0.7, 1.0, 1.0])
    want = logits / divisors[:, None]
    apply_temperature(logits, states, temperatures)
    assert torch.equal(logits, want)


def logprobs_of_the_sampled_token() -> None:
    """log softmax over the tokens that truncation left, and the rank of the token among them."""
    logits = normal(3, VOCAB) * 4
    logits[1, logits[1] < 1.0] = -math.inf
    sampled = torch.tensor([17, int(logits[1].argmax()), VOCAB - 1])
    found = compute_topk_scores(logits, 0, sampled)
    want = logits.double().log_softmax(-1).gather(-1, sampled[:, None])
    assert torch.equal(found.logprob_token_ids[:, 0], sampled)
    assert (found.logprobs - want).abs().max() < 1e-5
    at_least = (logits >= logits.gather(-1, sampled[:, None])).sum(-1)
    assert torch.equal(found.selected_token_ranks, at_least)


def logprobs_of_rounded_logits() -> None:
    """Logits in bfloat16, as a model gives them: the sum is in float32."""
    logits = (normal(2, VOCAB) * 4).bfloat16()
    sampled = torch.tensor([3, 2000])
    want = logits.double().log_softmax(-1).gather(-1, sampled[:, None])
    assert (compute_topk_scores(logits, 0, sampled).logprobs - want).abs().max() < 1e-5


def best_of_the_noised() -> None:
    """The token with the largest logit plus noise, by the request's seed and position alone."""
    logits = normal(4, VOCAB)
    # As large as seeds get, and beside it; the last row repeats the first one's request.
    seeds = torch.tensor([2**62 - 1, 5, 2**62 - 2])
    states = requests(0, 1, 2, 0)
    positions = torch.tensor([40, 40, 41, 40])
    logits[3] = logits[0]
    found = sample(logits, states, torch.ones(3), seeds, positions)
    for row, token in enumerate(found):
        noise = gumbel(int(seeds[states[row]]), int(positions[row]), VOCAB)
        noised = logits[row].double() + noise
        assert noised[token] > noised.max() - 1e-5, f"row {row}: {token}, not {noised.argmax()}"
    assert found[0] == found[3], "the place in the batch does not matter"


def temperature_zero_is_greedy() -> None:
    logits = normal(2, VOCAB)
    found = sample(
        logits, requests(0, 1), torch.tensor([0.0, 1.0]), torch.tensor([1, 1]), torch.tensor([0, 0])
    )
    assert found[0] == int(logits[0].argmax())


def shares_of_the_samples() -> None:
    """Chi-squared of 800 samples of 4 tokens over positions, and over the seeds of responses to a
    prompt."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 800
    logits = probabilities.log().expand(count, 4).contiguous()
    numbers = torch.arange(count)
    one, zero = torch.ones(count), torch.zeros(count, dtype=torch.int64)
    by_position = sample(logits, requests(*[0] * count), one, torch.full((count,), 12345), numbers)
    by_seed = sample(logits, requests(*range(count)), one, numbers + 2**61, zero)
    for drawn in (by_position, by_seed):
        counts = np.bincount(drawn, minlength=4)
        wanted = probabilities.numpy() * count
        # 99.9 % of all samples are below, with 3 degrees of freedom.
        assert ((counts - wanted) ** 2 / wanted).sum() < 16.27, counts


def smallest_sets(logits: Tensor, shares: list[float]) -> Tensor:
    """Which tokens of each row are in the smallest set whose probability reaches the share, [rows,
    vocabulary]."""
    ordered, index = logits.double().softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = before < torch.tensor(shares)[:, None]
    return torch.zeros_like(kept).scatter(-1, index, kept)


def check_truncated(found: Tensor, logits: Tensor, kept: Tensor) -> None:
    assert torch.equal(found > -math.inf, kept), (found > -math.inf).sum(-1)
    assert torch.equal(found[kept], logits[kept])


def truncation() -> None:
    """The 7 largest; the smallest set that reaches 0.6; both, first the largest; neither."""
    logits = normal(4, VOCAB) * 3
    largest = torch.tensor([7, VOCAB, 9, VOCAB], dtype=torch.int32)
    found = apply_top_k_top_p(logits.clone(), largest, torch.tensor([1.0, 0.6, 0.8, 1.0]))
    left = logits.clone()
    for row, count in ((0, 7), (2, 9)):
        left[row, left[row] < left[row].topk(count).values[-1]] = -math.inf
    kept = smallest_sets(left, [2.0, 0.6, 0.8, 2.0]) & (left > -math.inf)
    assert kept[0].sum() == 7 and 0 < kept[2].sum() < 9 and kept[3].all()
    check_truncated(found, logits, kept)


def truncation_of_small_batches() -> None:
    """Where a GPU has more processors than the batch has rows, each row is shared out over
    several."""
    logits = normal(3, VOCAB) * 3
    found = logits.clone()
    _apply_topp_split(found, None, torch.tensor([0.9, 0.6, 1.0]), -math.inf, 4)
    check_truncated(found, logits, smallest_sets(logits, [0.9, 0.6, 2.0]))


def logprobs_of_prompts() -> None:
    """Two prompts in one batch, the second with three tokens done before: each row scores the next
    token."""
    tokens = torch.randint(
        0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(3), dtype=torch.int32
    )
    starts = torch.tensor([0, 5, 9], dtype=torch.int32)
    states = requests(2, 1)
    done = torch.tensor([0, 3, 0, 0], dtype=torch.int32)
    wanted = torch.cat([tokens[2, 1:6], tokens[1, 4:8]]).long()
    found = get_prompt_logprobs_token_ids(9, starts, states, done, tokens)
    assert torch.equal(found, wanted)
    hidden, head = normal(9, 16), normal(16, VOCAB)
    ids, scores, _ = compute_prompt_logprobs_with_chunking(
        found, hidden, lambda rows: rows @ head, 0, "processed_logprobs"
    )
    logprobs = (hidden.double() @ head.double()).log_softmax(-1).gather(-1, wanted[:, None])
    assert torch.equal(ids[:, 0], wanted)
    assert (scores - logprobs).abs().max() < 1e-4


CASES = (
    temperature,
    logprobs_of_the_sampled_token,
    logprobs_of_rounded_logits,
    best_of_the_noised,
    temperature_zero_is_greedy,
    shares_of_the_samples,
    truncation,
    truncation_of_small_batches,
    logprobs_of_prompts,
)

if __name__ == "__main__":
    run_cases(CASES)
