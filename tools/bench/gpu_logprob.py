"""Response logprobs on a GPU: seconds and peak memory of the chunked operation against two that
hold all logits.

    python tools/bench/gpu_logprob.py --folder DIR [--rows 8192] [--hidden 4096] [--vocab 128256]
    [--chunks 256,1024]

Weights and hidden states in bfloat16. ``full``: float32 logits, log_softmax, gather; ``megatron``:
its vocab_parallel_cross_entropy over the whole sequence; ``chunked_N``: this package's, in chunks
of N rows. Every measurement is a process of its own; "train" is forward and backward. Peak memory
is counted above weights and states. One that does not fit is listed so. This program has not run on
a GPU yet.
"""

from __future__ import annotations

import argparse

import torch
from gpu_model import SHAPE_8B, add_options, leave_row, row_of_process, seconds, show
from torch import Tensor

from megatron_rl.policy.passes.logprobs import Head, token_values
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device, platform


def full(hidden: Tensor, weight: Tensor, targets: Tensor, _: int) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def megatron(hidden: Tensor, weight: Tensor, targets: Tensor, _: int) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (hidden @ weight.t()).float()[:, None]
    return -vocab_parallel_cross_entropy(logits, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    return token_values(hidden, weight, targets, Head(1.0, weight.shape[0], chunk, None)).logprobs


FUNCTIONS = {"full": full, "megatron": megatron, "chunked": chunked}


def measure(variant: str, mode: str, options: argparse.Namespace) -> dict[str, object]:
    """One measurement in this process."""
    name, _, chunk = variant.partition("_")
    row: dict[str, object] = {"pass": mode, "variant": variant, "rows": options.rows}
    launch.start()
    if name == "megatron":
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
    draw, where = torch.Generator(device()).manual_seed(0), device()
    hidden = torch.randn(options.rows, options.hidden, generator=draw, device=where).bfloat16()
    weight = (
        torch.randn(options.vocab, options.hidden, generator=draw, device=where)
        * options.hidden**-0.5
    ).bfloat16()
    targets = torch.randint(options.vocab, (options.rows,), generator=draw, device=where)
    train = mode == "train"
    hidden.requires_grad_(train), weight.requires_grad_(train)
    logprobs = torch.zeros(0)

    def once() -> None:
        nonlocal logprobs
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(train), platform():
            logprobs = FUNCTIONS[name](hidden, weight, targets, int(chunk or 0))
        if train:
            logprobs.sum().backward()
        logprobs = logprobs.detach()

    on_gpu = torch.cuda.is_available()
    inputs = torch.cuda.memory_allocated() if on_gpu else 0
    try:
        row["seconds"] = seconds(once, options.repeat)
    except torch.cuda.OutOfMemoryError:
        return row | {"outcome": "does not fit"}
    if on_gpu:
        row["peak_GiB"] = (torch.cuda.max_memory_allocated() - inputs) / 2**30
    return row | {"mean_logprob": logprobs.double().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Response logprobs on this machine.")
    shape = {name: SHAPE_8B[name] for name in ("hidden", "vocab")}
    add_options(parser, shape, has_config=False)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunks", default="256,1024", help="rows of a chunk, separated by commas")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        leave_row(measure(*options.one, options))
    variants = [f"chunked_{chunk}" for chunk in options.chunks.split(",")]
    rows = [
        {"pass": mode, "variant": variant, **row_of_process(variant, mode)}
        for mode in ("no_grad", "train")
        for variant in ("full", "megatron", *variants)
    ]
    show([rows], options)


if __name__ == "__main__":
    main()
