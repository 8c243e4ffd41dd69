"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in each process of its engines.

python -m vllm.entrypoints.openai.api_server --weight-transfer-config '{"backend": "megatron_rl"}'
...
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.engine.cpu_rotary import rotate_strided_parts
from megatron_rl.engine.requirements import require_vllm
from megatron_rl.runtime.device import device
from megatron_rl.runtime.process import die_with_server
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.reshard import ReshardSync

if TYPE_CHECKING:
    from megatron_rl.engine.weights import transfer_backend

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend ``megatron_rl`` known to vLLM. In a process of a version that is not
    supported the log says so, and vLLM refuses a start that asks for the backend; other starts do
    not need it."""
    die_with_server()
    try:
        require_vllm()
    except ValueError as error:
        logger.error("the weight transfer backend megatron_rl cannot be used: %s", error)
        return
    # Imports vLLM's own package of backends, which other versions have not.
    from megatron_rl.engine.weights import transfer_backend

    transfer_backend.register(receiving_end)
    rotate_strided_parts()


def receiving_end(
    sink: transfer_backend.WorkerSink, group: dist.ProcessGroup, options: TransferOptions
) -> transfer_backend.Sync:
    """Collective over trainer and workers: the plan is made. The trainer's end is
    ``weight_sync.fleet.joint.JointSync``."""
    return ReshardSync(None, sink, options, device=device(), group=group).sync
