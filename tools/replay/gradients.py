"""What a backward has left in a policy: for the replay of a step, and for tests."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.policy import optimizer
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime.device import platform


def gathered_gradients(policy: MegatronPolicy) -> Iterator[tuple[str, Tensor]]:
    """Collective: the gradients of ``policy.backward``, by HF name, whole; zeros of a frozen tower.
    With adapters theirs alone."""
    with platform():
        whole_gradients(policy.chunks)
    yield from policy.view.gather_saved.run(optimizer.gradient)


def gradient_norm(policy: MegatronPolicy) -> float:
    """Collective: of the gradient left by ``policy.backward``, over all parameters, as the
    optimizer step has it."""
    with platform():
        return optimizer.gradient_norm(policy.optimizer)


def whole_gradients(chunks: Sequence[Any]) -> None:
    """Collective: puts the whole gradient into ``main_grad`` on every rank.

    A distributed optimizer leaves each rank its share there.
    """
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)
