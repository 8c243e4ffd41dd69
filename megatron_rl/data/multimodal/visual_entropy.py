"""Visual entropy: how complex an image looks to a frozen vision encoder.

It is the entropy of the spectrum of the image's patch features.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 1024  # rows, or columns, of the features multiplied at a time


def visual_entropy(features: Float[Tensor, "patches d"]) -> Float[Tensor, ""]:
    """H = -sum p_k ln p_k in nats; 0 for equal patches.

    p are the eigenvalues of the patch covariance C = F' F / (patches - 1), divided by their sum,
    with F centered over patches. The non-zero eigenvalues of C are those of F F' / (patches - 1),
    so the smaller of the two matrices is decomposed; products are accumulated in chunks, in
    float64.

    Raises:
        ValueError: fewer than two patches.

    Source: Durian (arXiv 2602.21743) eq. 5-9.
    """
    patches, width = features.shape
    if patches < 2:
        raise ValueError(
            f"visual_entropy needs at least 2 patches and got {patches}; use a larger image or a"
            " smaller patch size"
        )
    centered = features.double() - features.double().mean(0)
    rows = centered if patches <= width else centered.T  # the shorter side first
    size = rows.shape[0]
    gram = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for chunk in rows.split(CHUNK, dim=1):
        gram += chunk @ chunk.T
    # Rounding can make a zero eigenvalue slightly negative.
    eigenvalues = torch.linalg.eigvalsh(gram / (patches - 1)).clamp(min=0)
    # Equal patches have no variance at all: 0 / tiny gives shares of 0, and those 0 ln 0 = 0.
    share = eigenvalues / eigenvalues.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return -torch.special.xlogy(share, share).sum()
