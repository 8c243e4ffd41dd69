"""Whether the first weight sync fills an engine that was built without weights."""

from __future__ import annotations

import logging

import torch.distributed as dist

from megatron_rl.config.schema import RolloutConfig

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


def can_wait_for_sync(config: RolloutConfig) -> bool:
    """Whether an engine of this kind may be built without weights. A quantized one may not: its
    scales are made from the weights that it is built with, and no test has compared the two."""
    if config.quantization is not None and dist.get_rank() == 0:
        logger.info(
            "rollout.quantization = %s: every engine reads the files of the model once",
            config.quantization,
        )
    return config.quantization is None


def all_reached(reason: str) -> bool:
    """Collective: whether a sync reaches every weight on every rank; logs why not.

    Args:
        reason: why this rank's weights are not all reached; "" where they are.
    """
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    first = next(filter(None, reasons), None)
    if first is not None and dist.get_rank() == 0:
        logger.warning("every engine reads the files of the model once: %s", first)
    return first is None
