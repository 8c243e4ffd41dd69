"""Loads a Hugging Face directory into a Megatron policy and pushes its weights into a vLLM server.

torchrun --nproc-per-node 2 examples/vllm_server/push.py --server http://127.0.0.1:8000 \\
    --model NEW_WEIGHTS --tensor 2 --version 1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.fleet.fleet import FleetSync


def main() -> None:
    """Ends the process: 0 when the server serves the new weights."""
    parser = parser_of(__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallelism of the policy")
    parser.add_argument(
        "--params", default="bfloat16", help="dtype of the policy's weights, that of the server"
    )
    options = parser.parse_args()
    with launch.reported():
        push(options)
    launch.exit_process(0)


def push(options: argparse.Namespace) -> None:
    world = launch.start()
    policy = MegatronPolicy(
        validate(ModelConfig, compose("model/hf") | {"path": str(options.model)}, "--model"),
        ParallelConfig(**compose("parallel/single") | {"tensor": options.tensor}),
        PrecisionConfig(**compose("precision/bf16") | {"params": options.params}),
        OptimConfig(**compose("optim/adam")),
        PolicySettings(
            temperature=1.0,
            keep_reference=False,
            total_optimizer_steps=1,
            max_sequence_tokens=1024,
            tokens_per_microbatch=1024,
        ),
    )
    # What a trainer does once ...
    fleet = FleetSync(policy, world, "", TransferOptions(), "wait", device())
    # ... and after each of its updates
    report = fleet.sync(options.version, {"server": options.server})
    if report.lost:
        raise ValueError("; ".join(report.lost.values()))
    if world.is_main:
        print(
            f"{report.sync.bytes_total} bytes, the least possible, in {report.sync.seconds:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
