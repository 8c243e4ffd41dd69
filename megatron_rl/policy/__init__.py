"""The policy: the only package that imports megatron."""

import importlib.util
import logging
import sys
import warnings
from types import ModuleType
from typing import Any

# Warnings that come once for every module and rank: megatron says what is not installed
# (precision.describe says it once), and torch announces new names of collectives.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
# Messages that come for every model: its class is deprecated (see ``model.HiddenStates``), and the
# parameters of a distributed optimizer get a layout only now.
for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)

# megatron's schedules import the Triton kernels of its paged stash of experts' activations. No run
# here uses that, and a machine without a GPU has no Triton.
if importlib.util.find_spec("triton") is None:
    name = "megatron.core.transformer.moe.ops.paged_stash"
    stand_in: Any = sys.modules.setdefault(name, ModuleType(name))
    stand_in.GLOBAL_BLOCK_SIZE = 1024
    stand_in.paged_stash_copy_kernel = stand_in.paged_stash_pop_kernel = None
