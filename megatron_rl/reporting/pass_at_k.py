"""The chance that at least one of k samples is correct."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """pass@k = 1 - C(num_samples - num_correct, k) / C(num_samples, k) of one prompt.

    It is the unbiased estimate: the share of the k-subsets of the samples that contain a correct
    one. Exact integers, one division.

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
