"""The chance that at least one of k samples is correct, and the keys of metrics that hold it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import comb

from megatron_rl.reporting.metrics_file import Row

PASS_AT = "eval/pass_at_"  # the k follows
_PASS_AT_K = re.compile(rf"{PASS_AT}(\d+)")  # with a "/SOURCE" after it, it is another metric


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """pass@k = 1 - C(num_samples - num_correct, k) / C(num_samples, k) of one prompt.

    It is the unbiased estimate: the share of the k-subsets of the samples that contain a correct
    one. Exact integers, one division.

    Example: of 4 samples 1 is correct. Of the 6 pairs 3 are of wrong ones alone, so pass@2 is 0.5.

    Raises:
        ValueError: k is not within 1 .. num_samples.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"evaluation.pass_at = {k}: must lie within 1 and the {num_samples} responses of a"
            " prompt"
        )
    assert 0 <= num_correct <= num_samples
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def pass_at_ks(rows: Iterable[Row]) -> list[int]:
    """The k of which a row has pass@k, ascending."""
    keys = {key for row in rows for key, value in row.items() if value is not None}
    return sorted(int(found[1]) for found in map(_PASS_AT_K.fullmatch, keys) if found)
