"""The facts of this machine on which the number format of the policy depends."""

import functools
import importlib.util
import logging

import torch

from megatron_rl.config.rules.hardware import Machine

logger = logging.getLogger(__name__)


@functools.cache
def this_machine() -> Machine:
    """The machine of this process, examined once.

    Transformer Engine counts when it can be imported and there is a CUDA device, without which its
    layers cannot run. megatron-core takes Adam from the first of Transformer Engine and apex that
    it can import.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    engine = None if capability is None else transformer_engine_version()
    adam = "torch"
    if engine is not None:
        adam = "transformer_engine"
    elif importlib.util.find_spec("apex") is not None:
        adam = "apex"
    return Machine(capability, engine, adam)


def transformer_engine_version() -> str | None:
    """The version of Transformer Engine, or None when it cannot be imported.

    Warns when it is installed but broken.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        import transformer_engine
        import transformer_engine.pytorch
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning(
            "Transformer Engine is installed and cannot be imported, layers come from megatron-core"
            " and torch: %s",
            error,
        )
        return None
    version: str = transformer_engine.__version__
    return version
