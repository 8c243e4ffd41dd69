"""How complex an image looks to a frozen vision encoder: the entropy of the spectrum of its patch features."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 1024  # rows, or columns, of the features multiplied at a time


def visual_entropy(features: Float[Tensor, "patches d"]) -> Float[Tensor, ""]:
    """H = -sum p_k ln p_k in nats, p the eigenvalues of the patch covariance C divided by their sum; 0 for equal patches.

    C = F' F / (patches - 1) with F centred over patches. Its non-zero eigenvalues are those of F F' / (patches - 1), so the
    smaller of the two matrices is decomposed; products are accumulated in chunks, in float64.

    Raises:
        ValueError: fewer than two patches.
    Source: Durian (arXiv 2602.21743) eq. 5-9.
    """
    patches, width = features.shape
    if patches < 2:
        raise ValueError(f"visual_entropy needs at least 2 patches and got {patches}; use a larger image or a smaller patch size")
    centred = features.double() - features.double().mean(0)
    rows = centred if patches <= width else centred.T  # smaller side first
    matrix = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.float64, device=features.device)
    for chunk in rows.split(CHUNK, dim=1):
        matrix += chunk @ chunk.T
    eigenvalues = torch.linalg.eigvalsh(matrix / (patches - 1)).clamp(min=0)
    share = eigenvalues / eigenvalues.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return -torch.special.xlogy(share, share).sum()
