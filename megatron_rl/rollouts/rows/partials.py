"""Metrics of tokens that lie on many ranks, equal bit for bit however they lie.

A floating-point sum depends on its order, so an all-reduce of every rank's sum would depend on who
holds what. Here each response is summed alone, in float64 and in the order of its tokens, by
whoever holds it; these partials are gathered as one table in canonical row order, and the table is
reduced alike on every rank.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.runtime.launch import World

Tokens = Float[np.ndarray, " tokens"]
Lengths = Int[np.ndarray, " rows"]


def response_sums(values: Tokens, lengths: Lengths) -> Float[np.ndarray, " rows"]:
    """The float64 sum of each response; 0 of an empty one."""
    return _per_response(np.add, values, lengths)


def response_maxima(values: Tokens, lengths: Lengths) -> Float[np.ndarray, " rows"]:
    """The largest value of each response; 0 of an empty one."""
    return _per_response(np.maximum, values, lengths)


def _per_response(reduce: np.ufunc, values: Tokens, lengths: Lengths) -> np.ndarray:
    # Converted before the reduction: numpy converts during one in blocks of its own, whose bounds
    # depend on where a response lies.
    values = values.astype(np.float64)
    result = np.zeros(len(lengths))
    filled = lengths > 0  # reduceat takes the next value for an empty segment
    starts = (lengths.cumsum() - lengths)[filled]
    if len(starts):
        result[filled] = reduce.reduceat(values, starts)
    return result


def of_all_rows(
    responses: Responses, partials: np.ndarray, world: World
) -> Float[np.ndarray, "all_rows columns"]:
    """Collective: the table of all rows in canonical order, from partials of the rows that lie on
    each rank. A row that lies on several ranks is taken from its holder."""
    rows = responses.tokens.rows
    tells = responses.holders[rows] == world.rank
    table = np.zeros((len(responses), partials.shape[1]))
    named = np.zeros(len(responses), dtype=np.int64)
    for held_rows, held_partials in world.all_gather((rows[tells], partials[tells])):
        table[held_rows] = held_partials
        named[held_rows] += 1
    assert (named == 1).all(), "every row is held by one rank"
    return table


def mismatch_partials(
    old_logprobs: Tokens, sampler_logprobs: Tokens, lengths: Lengths
) -> Float[np.ndarray, "rows 4"]:
    """For the rows of this rank, with d = old - sampler: sum |d|, max |d|, sum exp(d), and sum
    exp(d) - d - 1."""
    difference = (old_logprobs - sampler_logprobs).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are reported as such
        ratio = np.exp(difference)
        excess = ratio - difference - 1
    size = np.abs(difference)
    largest = response_maxima(size, lengths)
    sums, ratios, excesses = (response_sums(each, lengths) for each in (size, ratio, excess))
    return np.column_stack([sums, largest, ratios, excesses])


def mismatch_of_partials(
    table: Float[np.ndarray, "all_rows 4"], num_tokens: int
) -> dict[str, float]:
    """The ``mismatch/`` metrics from the ``mismatch_partials`` of all rows."""
    if num_tokens == 0:
        return {}
    return {
        "mismatch/logprob_abs_diff_mean": float(table[:, 0].sum() / num_tokens),
        "mismatch/logprob_abs_diff_max": float(table[:, 1].max()),
        "mismatch/ratio_mean": float(table[:, 2].sum() / num_tokens),
        "mismatch/kl_k3": float(table[:, 3].sum() / num_tokens),
    }


def token_mean(sums: Float[np.ndarray, " all_rows"], lengths: Lengths | Sequence[int]) -> float:
    """The mean over all tokens, from the ``response_sums`` of all rows in canonical order; 0
    without a token."""
    num_tokens = int(np.sum(lengths))
    return float(sums.sum() / num_tokens) if num_tokens else 0.0
