"""The arrays of a training checkpoint, whole, as torch reads them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoints import safe_load


def arrays(path: Path) -> dict[str, torch.Tensor]:
    """Every array of a checkpoint, whole, read by torch itself."""
    index = safe_load.read_index(path).state_dict_metadata
    whole = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(whole, checkpoint_id=path, no_dist=True)
    return whole


def same_arrays(path: Path, other: Path) -> None:
    """Both checkpoints hold the same bits, for all rows of the vocabulary that both have."""
    first, second = arrays(path), arrays(other)
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    for key, array in first.items():
        rows = min(len(array), len(second[key]))
        got, want = array[:rows], second[key][:rows]
        assert got.dtype == want.dtype and torch.equal(got, want), f"{path} {other}: {key}"
        assert rows >= len(array) or "embedding" in key or "output_layer" in key
