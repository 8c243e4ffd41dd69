"""What methods that look inside a response ask of the policy, beside plain log-probabilities: time
and peak memory at a large vocabulary.

    python tools/bench/token_values.py [--tokens 1024] [--vocab 152064] [--hidden 1024]
    [--chunk 256] [--top-k 3] [--repeats 5] [--record FILE]

``logprobs``: of the given tokens alone. ``entropy``: with entropies, ``entropy_gradient``: with
their gradient. ``top_k``: with the logprobs of the most likely tokens, and their gradient.
``nucleus``: with the entropy of the tokens that reach the probability 0.8, and its gradient. Every
measurement is a process of its own; the variants take turns; a factor is that of two measurements
of one round. Medians and quartiles of all rounds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial

import logprob
import torch
from machine import Watch, description, spread
from torch import Tensor

from megatron_rl.policy.passes.head import Head
from megatron_rl.policy.passes.logprobs import token_values
from megatron_rl.policy.passes.nucleus import nucleus_entropy

PLAIN = "logprobs"
VARIANTS = {
    PLAIN: {"entropy": "none"},
    "entropy": {"entropy": "value"},
    "entropy_gradient": {"entropy": "grad"},
    "top_k": {"entropy": "none"},
    "nucleus": {"entropy": "none"},
}
NUCLEUS = 0.8  # SIREN's
FIGURES = {"wall s": "wall_s", "processor s": "cpu_s", "peak MiB above inputs": "peak_mib"}


def values(
    variant: str, top_k: int, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int
) -> Tensor:
    """One number a token, with all that the variant computes in it."""
    entropy = VARIANTS[variant]["entropy"]
    count = top_k if variant == "top_k" else 0
    head = Head(1.0, weight.shape[0], chunk, None, entropy, count)
    found = token_values(hidden, weight, targets, head)
    result = found.logprobs
    if found.entropy is not None:
        result = result + found.entropy
    if found.topk_logprobs is not None:
        result = result + found.topk_logprobs.sum(1)
    if variant == "nucleus":
        result = result + nucleus_entropy(hidden, weight, replace(head, nucleus=NUCLEUS))
    return result


def table(results: logprob.Measurements, sizes: argparse.Namespace, watch: Watch) -> str:
    """Markdown: a line for each pass and variant, each figure with its factor over plain
    logprobs."""
    lines = [
        f"Tokens {sizes.tokens}, vocabulary {sizes.vocab}, hidden {sizes.hidden}, float32, chunk"
        f" {sizes.chunk} tokens, K {sizes.top_k}, {torch.get_num_threads()} thread;"
        f" {sizes.repeats} rounds, median (quartiles); x: over plain logprobs of the same round.",
        "",
        f"{description()}, torch {torch.__version__}; {watch.load()}.",
        "",
        f"| pass | variant | {' | '.join(f'{name} | x' for name in FIGURES)} |",
        f"|{'---|' * (2 + 2 * len(FIGURES))}",
    ]
    for key, runs in results.items():
        mode, variant = key.split("/")
        plain = results[f"{mode}/{PLAIN}"]
        cells = []
        for figure in FIGURES.values():
            cells.append(spread([run[figure] for run in runs]).text())
            pairs = zip(runs, plain, strict=True)
            cells.append(spread([run[figure] / other[figure] for run, other in pairs]).text(2))
        lines.append(f"| {mode} | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = logprob.command_line(__doc__, 1024)
    parser.add_argument("--top-k", type=int, default=3)
    sizes = parser.parse_args()
    if sizes.one:
        variant, mode = sizes.one
        logprob.FUNCTIONS[variant] = partial(values, variant, sizes.top_k)
        print(json.dumps(logprob.measure(variant, mode, sizes)))
        return
    watch = Watch()
    found = logprob.measured_in_turns(__file__, VARIANTS, sizes, [f"--top-k={sizes.top_k}"])
    text = table(found, sizes, watch)
    print(text)
    if sizes.record:
        title = "# What methods read of the policy, beside log-probabilities"
        command = "`python tools/bench/token_values.py`"
        sizes.record.write_text(f"{title}\n\n{command}\n\n{text}", encoding="ascii")


if __name__ == "__main__":
    main()
