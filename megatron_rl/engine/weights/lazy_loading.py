"""An engine that is built without weights, and whether the first weight sync fills it."""

import logging
from functools import cache
from typing import Any

import torch.distributed as dist

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.runtime.launch import gather_objects

logger = logging.getLogger(__name__)

WITHOUT_WEIGHTS = "megatron_rl_without_weights"  # a load format of vLLM's
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


@cache
def register_loader() -> None:
    """Makes ``WITHOUT_WEIGHTS`` known to vLLM, once in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class LoaderWithoutFiles(DummyModelLoader):
        """Arbitrary numbers in the parameters. Buffers keep what the model has computed for them
        (how an image is normalized), for no file and no sync may have it."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
            super().load_weights(model, model_config)
            for buffer, values in kept:
                buffer.copy_(values)

    register_model_loader(WITHOUT_WEIGHTS)(LoaderWithoutFiles)


def all_reached(reason: str) -> bool:
    """Collective: whether a sync reaches every weight on every rank; logs why not.

    Args:
        reason: why this rank's weights are not all reached; "" where they are.
    """
    first = next(filter(None, gather_objects(reason)), None)
    if first is not None and dist.get_rank() == 0:
        logger.warning("every engine reads the files of the model once: %s", first)
    return first is None
