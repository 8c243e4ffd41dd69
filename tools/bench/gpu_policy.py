"""Policy on a GPU: seconds of an update and of a logprob pass in every number format.

    python tools/bench/gpu_policy.py --folder DIR [--layers 8] [--sequences 8] [--length 2048] [--precisions bf16,fp8_tensorwise]

Every format is a process of its own. Columns: median seconds; TFLOP/s of the update (three times the products of the forward) and
their share of what a bfloat16 product of 8192 x 8192 matrices reaches on this card; peak memory; mean and largest difference of the
logprobs from those of bf16. Formats that the machine refuses are listed with the reason. This program has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from gpu_model import SHAPE_8B, add_options, build_policy, policy_gradient, random_batch, read_config, seconds, show, write_model

from megatron_rl.config.load import ConfigError
from megatron_rl.runtime import launch
from megatron_rl.runtime.cpu import device

PRECISIONS = "bf16,fp8_delayed,fp8_tensorwise,fp8_blockwise,mxfp8"
ROW = "ROW "


def product_tflops(size: int = 8192) -> float:
    """Rate of one large product in bfloat16: what the card really gives."""
    size = size if torch.cuda.is_available() else 512
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, 20, 3) / 1e12


def update_flops(options: argparse.Namespace) -> float:
    """Products of forward and backward: layers, causal attention, output layer on the rows of responses."""
    tokens, head_dim = options.sequences * options.length, options.hidden // options.heads
    layer = options.hidden * (2 * options.hidden + 2 * options.kv_heads * head_dim + 3 * options.ffn)
    attention = options.layers * options.hidden * options.length  # two products over half a square
    return 6 * tokens * (options.layers * layer + attention) + 6 * tokens * 7 / 8 * options.hidden * options.vocab


def measure(options: argparse.Namespace) -> dict[str, object]:
    """One number format in this process."""
    row: dict[str, object] = {"precision": options.one}
    launch.start()
    try:
        config = read_config(write_model(options), f"precision={options.one}", f"batch.tokens_per_microbatch={options.length * 2}")
    except ConfigError as error:
        return row | {"refused": error.problems[0]}
    policy = build_policy(config, options.length)
    batch = random_batch(options.sequences, options.length, options.vocab)
    microbatches = [[row, row + 1] for row in range(0, options.sequences - 1, 2)]
    scores = policy.logprobs(batch, microbatches).logprobs.cpu()
    torch.save(scores, options.folder / f"logprobs_{options.one}.pt")
    forward = seconds(lambda: policy.logprobs(batch, microbatches), options.repeat)
    update = seconds(lambda: policy.update(batch, microbatches, policy_gradient), options.repeat, 2)
    rate = update_flops(options) / update / 1e12
    row |= {"logprobs_s": forward, "update_s": update, "TFLOP/s": rate, "share": rate / product_tflops()}
    if torch.cuda.is_available():
        row["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    baseline = options.folder / "logprobs_bf16.pt"
    if baseline.is_file():
        difference = (scores - torch.load(baseline)).abs()
        row |= {"difference_mean": difference.mean().item(), "difference_max": difference.max().item()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Number formats of the policy on this machine.")
    add_options(parser, SHAPE_8B | {"layers": 8})
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precisions", default=PRECISIONS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(ROW + json.dumps(measure(options)), flush=True)
        launch.leave(0)
    rows = []
    for name in options.precisions.split(","):
        done = subprocess.run([sys.executable, Path(__file__), *sys.argv[1:], "--one", name], stdout=subprocess.PIPE, text=True)
        found = [json.loads(line.removeprefix(ROW)) for line in done.stdout.splitlines() if line.startswith(ROW)]
        rows += found or [{"precision": name, "refused": f"the process ended with code {done.returncode}"}]
    show([rows], options)


if __name__ == "__main__":
    main()
