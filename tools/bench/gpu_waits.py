"""Where the host waits for the device: every place in one logprob pass and in one update, with the
times it did.

    python tools/bench/gpu_waits.py --folder DIR [--layers 4] [--sequences 8] [--length 2048]
    [--override key=value]

A wait drains the queue of kernels, and the device idles until the host has filled it again. Needs
CUDA; without it the passes run and nothing is counted. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter

import torch
from gpu_model import (
    SHAPE_8B,
    add_options,
    build_policy,
    host_waits,
    policy_gradient,
    random_batch,
    read_config,
    show,
    write_model,
)

from megatron_rl.passes import LocalBatch
from megatron_rl.runtime import launch


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times that the host waits for the device on this machine."
    )
    add_options(parser, SHAPE_8B | {"layers": 4})
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    launch.start()
    config = read_config(
        write_model(options), f"batch.tokens_per_microbatch={options.length * 2}", *options.override
    )
    policy = build_policy(config, options.length)
    batch = random_batch(options.sequences, options.length, options.vocab)
    microbatches = [[row, row + 1] for row in range(0, options.sequences - 1, 2)]
    actions = {
        "logprobs": lambda: policy.score(LocalBatch(batch, microbatches)),
        "update": lambda: policy.update(LocalBatch(batch, microbatches), policy_gradient),
    }
    totals, places = [], []
    for name, action in actions.items():
        action()  # the first one sets things up
        counting = host_waits() if torch.cuda.is_available() else contextlib.nullcontext(Counter())
        with counting as found:
            action()
        counted = found.total() if torch.cuda.is_available() else "not counted: no CUDA device"
        totals.append({"pass": name, "micro-batches": len(microbatches), "waits": counted})
        places += [
            {"pass": name, "place": where, "times": count} for where, count in found.most_common()
        ]
    show([totals, *([places] if places else [])], options)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
