"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every process of an engine or a server.

python -m vllm.entrypoints.openai.api_server --weight-transfer-config '{"backend": "megatron_rl"}' ...
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.rollout import transfer_backend
from megatron_rl.runtime.cpu import device
from megatron_rl.weight_sync.reshard import ReshardSync


def register() -> None:
    """Makes the backend ``megatron_rl`` known to vLLM."""
    transfer_backend.register(receiving_end)


def receiving_end(taker: transfer_backend.Taker, group: dist.ProcessGroup, info: transfer_backend.InitInfo) -> ReshardSync:
    """Collective over trainer and workers: the plan is made. The trainer's end is ``weight_sync.server.ServerSync``."""
    return ReshardSync(
        None, taker, gpus_per_node=1, bucket_mib=info.bucket_mib, in_flight=info.in_flight, verify=info.verify, device=device(), group=group
    )
