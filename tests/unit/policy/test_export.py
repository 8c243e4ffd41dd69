"""Export onto a disk that is full: gathering weights is collective, so every one is taken though
writing has failed."""

import torch
from safetensors import SafetensorError

from megatron_rl.checkpoints.hf import ShardWriter
from megatron_rl.policy.state.export import _write
from megatron_rl.runtime.disk import says_full

DISK_SIZE = "1m"


def test_all_weights_are_taken_though_the_disk_is_full(small_disk):
    taken = []

    def weights():
        for number in range(5):
            taken.append(number)
            yield f"layer{number}", torch.ones(200_000)

    failure = _write(weights(), ShardWriter(small_disk, max_bytes=1), is_main=True)
    assert taken == [0, 1, 2, 3, 4]
    assert isinstance(failure, OSError | SafetensorError) and says_full(failure)
