"""torchrun program (2 processes): what is switched on for a CUDA device, or saves time or memory,
against the plain way. Arguments: a folder for the models, names of checks (none: all)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_rl.policy import cpu
from megatron_rl.policy.megatron_policy import MegatronPolicy
from tests.numerics import models
from tests.numerics.policy_reference import make_batch
from tests.numerics.policy_worker import build

FOLDER = Path(sys.argv[1])
SEQUENCE = {"tensor": 2, "sequence": True}


def model(name: str) -> Path:
    path = FOLDER / name
    if dist.get_rank() == 0 and not path.is_dir():
        models.save(name, path)
    dist.barrier()
    return path


def scored(policy: MegatronPolicy) -> torch.Tensor:
    batch = make_batch()
    rows = list(range(batch.num_responses))
    return policy.logprobs(batch, [rows[:2], rows[2:]]).logprobs


def random_states() -> None:
    """A sequence-parallel forward enters fork() at the embedding and around the layers. What is
    installed where there is a CUDA device lets it through, and changes no number."""
    policy = build(model("qwen2"), SEQUENCE)
    plain = scored(policy)
    policy.close()
    real = cpu.apply

    def apply_with_cuda() -> None:
        # As a new process: nobody has made a tracker yet.
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            real()

    with mock.patch.object(cpu, "apply", apply_with_cuda):
        policy = build(model("qwen2"), SEQUENCE)
    assert torch.equal(scored(policy), plain)
    policy.close()


CHECKS: dict[str, Callable[[], None]] = {"random_states": random_states}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CHECKS:
        CHECKS[name]()
        if dist.get_rank() == 0:
            print(f"OK {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
