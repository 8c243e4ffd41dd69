"""Policy on a GPU: seconds of an update and of a logprob pass in every number format.

    python tools/bench/gpu_policy.py --folder DIR [--layers 8] [--sequences 8] [--length 2048]
    [--precisions bf16,fp8_tensorwise]

Every format is a process of its own. Columns: median seconds; TFLOP/s of the update (three times
the products of the forward) and of a bfloat16 product of 8192 x 8192 matrices measured in the same
process on the same card, and the share of the first in the second; how many times as fast as in
bf16 the update is; peak memory; mean and largest difference of the logprobs from those of bf16.
Formats that the machine refuses are listed with the reason. With ``--profile`` a second table: the
ten kernels of one update that take the device longest. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from gpu_model import (
    SHAPE_8B,
    add_options,
    build_policy,
    leave_row,
    policy_gradient,
    random_batch,
    read_config,
    row_of_process,
    seconds,
    show,
    write_model,
)

from megatron_rl.errors import ConfigError
from megatron_rl.passes import LocalBatch
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device

PRECISIONS = "bf16,fp8_delayed,fp8_tensorwise,fp8_blockwise,mxfp8"


def product_tflops() -> float:
    """Rate of one large product in bfloat16: what the card really gives."""
    size = 8192 if torch.cuda.is_available() else 512
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, 20, 3) / 1e12


def forward_flops(options: argparse.Namespace, response_tokens: int) -> float:
    """Of the products of a forward: two for each number of a layer's matrices and each token,
    causal attention (two products over half a square each), the output layer on ``response_tokens``
    rows."""
    tokens, head_dim = options.sequences * options.length, options.hidden // options.heads
    layer = options.hidden * (
        2 * options.hidden + 2 * options.kv_heads * head_dim + 3 * options.ffn
    )
    attention = options.hidden * options.length
    return (
        2 * tokens * options.layers * (layer + attention)
        + 2 * response_tokens * options.hidden * options.vocab
    )


def update_flops(options: argparse.Namespace) -> float:
    """Of forward and backward, which has two products for each one. What is computed a second time
    to save memory does not count."""
    return 3 * forward_flops(options, options.sequences * (options.length - options.length // 8))


def against_bf16(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The rows with ``x bf16``: how many times as fast as the row of bf16 their update is. Rows
    that were refused have none."""
    seconds_bf16 = {
        row["update_s"] for row in rows if row["precision"] == "bf16" and "update_s" in row
    }
    for row in rows:
        if seconds_bf16 and "update_s" in row:
            (base,) = seconds_bf16
            row["x bf16"] = base / row["update_s"]
    return rows


def top_kernels(action: Callable[[], object], count: int = 10) -> list[dict[str, object]]:
    """What takes the device longest in one ``action``, on a CPU the processor: name, milliseconds
    in all, calls."""
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]
    ) as profile:
        action()
        if on_gpu:
            torch.cuda.synchronize()
    taken = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
        for event in profile.key_averages()
    ]
    taken.sort(key=lambda pair: -pair[0])
    return [
        {"kernel": event.key[:80], "ms": us / 1e3, "calls": event.count}
        for us, event in taken[:count]
    ]


def measure(options: argparse.Namespace) -> dict[str, object]:
    """One number format in this process."""
    row: dict[str, object] = {"precision": options.one}
    launch.start()
    try:
        config = read_config(
            write_model(options),
            f"precision={options.one}",
            f"batch.tokens_per_microbatch={options.length * 2}",
            *options.override,
        )
    except ConfigError as error:
        return row | {"refused": error.problems[0]}
    policy = build_policy(config, options.length)
    batch = random_batch(options.sequences, options.length, options.vocab)
    microbatches = [[row, row + 1] for row in range(0, options.sequences - 1, 2)]
    scores = policy.score(LocalBatch(batch, microbatches)).logprobs.cpu()
    torch.save(scores, options.folder / f"logprobs_{options.one}.pt")
    forward = seconds(lambda: policy.score(LocalBatch(batch, microbatches)), options.repeat)
    update = seconds(
        lambda: policy.update(LocalBatch(batch, microbatches), policy_gradient), options.repeat, 2
    )
    rate, product = update_flops(options) / update / 1e12, product_tflops()
    row |= {
        "logprobs_s": forward,
        "update_s": update,
        "TFLOP/s": rate,
        "product TFLOP/s": product,
        "share": rate / product,
    }
    if torch.cuda.is_available():
        row["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    baseline = options.folder / "logprobs_bf16.pt"
    if baseline.is_file():
        difference = (scores - torch.load(baseline)).abs()
        row |= {
            "difference_mean": difference.mean().item(),
            "difference_max": difference.max().item(),
        }
    if options.profile:
        kernels = top_kernels(
            lambda: policy.update(LocalBatch(batch, microbatches), policy_gradient)
        )
        row["kernels"] = [{"kernels of": options.one, **kernel} for kernel in kernels]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Number formats of the policy on this machine.")
    add_options(parser, SHAPE_8B | {"layers": 8})
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precisions", default=PRECISIONS)
    parser.add_argument(
        "--profile", action="store_true", help="also list the kernels that take longest"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        leave_row(measure(options))
    names = options.precisions.split(",")
    rows = [{"precision": name, **row_of_process(name)} for name in names]
    kernels = [kernel for row in rows for kernel in row.pop("kernels", [])]
    show([against_bf16(rows), *([kernels] if kernels else [])], options)


if __name__ == "__main__":
    main()
