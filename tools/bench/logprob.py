"""Time and peak memory of response log-probabilities: the chunked operation against two that hold
all logits.

    python tools/bench/logprob.py [--tokens 4096] [--vocab 152064] [--hidden 1024] [--chunk 256]
    [--repeats 5] [--record FILE]

Every measurement is a process of its own (peak memory is a high-water mark of a process). ``full``:
float32 logits, log_softmax, gather. ``megatron``: output layer, then megatron's
vocab_parallel_cross_entropy over the whole sequence. ``chunked``: ours. The variants take turns; a
factor is that of two measurements of one round. Medians and quartiles of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from machine import Watch, description, in_turns, spread
from torch import Tensor

from megatron_rl.policy.passes.logprobs import response_logprobs

VARIANTS = ("full", "megatron", "chunked")
# Factor over ``full`` that the chunked operation is to stay below.
TARGETS = {"memory_train": 0.35, "seconds_train": 1.4, "seconds_no_grad": 1.0}
# Factor -> (pass, figure of a measurement).
FACTORS = {
    "memory_train": ("train", "peak_mib"),
    "seconds_train": ("train", "wall_s"),
    "seconds_no_grad": ("no_grad", "wall_s"),
    "processor_seconds_train": ("train", "cpu_s"),
    "processor_seconds_no_grad": ("no_grad", "cpu_s"),
}
Measurements = dict[str, list[dict[str, float]]]


def full(hidden: Tensor, weight: Tensor, targets: Tensor, _: int) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def megatron(hidden: Tensor, weight: Tensor, targets: Tensor, _: int) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (hidden @ weight.t()).float()[:, None]
    return -vocab_parallel_cross_entropy(logits, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    return response_logprobs(
        hidden,
        weight,
        targets,
        temperature=1.0,
        vocab_size=weight.shape[0],
        chunk_tokens=chunk,
        group=None,
    )[0]


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "full": full,
    "megatron": megatron,
    "chunked": chunked,
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(variant: str, mode: str, sizes: argparse.Namespace) -> dict[str, float]:
    """One measurement in this process."""
    if variant == "megatron":
        from megatron.core import parallel_state

        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    function = FUNCTIONS[variant]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
    weight = torch.randn(sizes.vocab, sizes.hidden, generator=generator).mul_(sizes.hidden**-0.5)
    targets = torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator)
    train = mode == "train"
    few = slice(
        0, min(8, sizes.tokens)
    )  # libraries set up their threads and buffers outside the measurement
    with torch.no_grad():
        function(hidden[few], weight[:64], targets[few] % 64, 4)
    hidden.requires_grad_(train), weight.requires_grad_(train)
    baseline, wall, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    with torch.set_grad_enabled(train):
        logprobs = function(hidden, weight, targets, sizes.chunk)
        if train:
            (logprobs * torch.linspace(-1, 1, sizes.tokens)).sum().backward()
    result = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mib": (peak_bytes() - baseline) / 2**20,
    }
    result["mean_logprob"] = logprobs.detach().double().mean().item()
    result["gradient_norm"] = weight.grad.double().norm().item() if weight.grad is not None else 0.0
    return result


def table(results: Measurements, sizes: argparse.Namespace, watch: Watch) -> str:
    """Markdown: a line for each measurement, then the factors over ``full`` against their
    targets."""
    lines = [
        (
            f"Tokens {sizes.tokens}, vocabulary {sizes.vocab}, hidden {sizes.hidden}, float32,"
            f" chunk {sizes.chunk} tokens, {torch.get_num_threads()} thread; {sizes.repeats}"
            " rounds, median (quartiles)."
        ),
        "",
        f"{description()}, torch {torch.__version__}; {watch.load()}.",
        "",
        (
            "| pass | variant | wall s | processor s | peak MiB above inputs | mean logprob |"
            " gradient norm |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for key, runs in results.items():
        mode, variant = key.split("/")
        wall, cpu, peak = (
            spread([run[name] for run in runs]) for name in ("wall_s", "cpu_s", "peak_mib")
        )
        same = f"{runs[0]['mean_logprob']:.6f} | {runs[0]['gradient_norm']:.6f}"
        lines.append(
            f"| {mode} | {variant} | {wall.text()} | {cpu.text()} | {peak.text(0)} | {same} |"
        )
    lines += ["", "| chunked / full, of one round | median (quartiles) | target |", "|---|---|---|"]
    for name, (mode, figure) in FACTORS.items():
        pairs = zip(results[f"{mode}/chunked"], results[f"{mode}/full"], strict=True)
        factor = spread([ours[figure] / other[figure] for ours, other in pairs])
        lines.append(f"| {name} | {factor.text(3)} | {TARGETS[name] if name in TARGETS else '-'} |")
    return "\n".join(lines) + "\n"


def command_line(description: str | None, tokens: int) -> argparse.ArgumentParser:
    """Sizes, rounds, record, and the one measurement of a child process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", tokens), ("vocab", 152064), ("hidden", 1024), ("chunk", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds in which every variant is measured once"
    )
    parser.add_argument("--record", type=Path, help="also write the table there")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "PASS"), help=argparse.SUPPRESS)
    return parser


def measured_in_turns(
    script: str, variants: Iterable[str], sizes: argparse.Namespace, more: Sequence[str] = ()
) -> Measurements:
    """Every variant, without and with gradients, in processes of its own that run ``script``."""
    own = [f"--{name}={getattr(sizes, name)}" for name in ("tokens", "vocab", "hidden", "chunk")]
    command = [sys.executable, script, *own, *more, "--one"]
    keys = [(mode, variant) for mode in ("no_grad", "train") for variant in variants]
    turns = {
        f"{mode}/{variant}": partial(measure_apart, command, variant, mode)
        for mode, variant in keys
    }
    return in_turns(turns, sizes.repeats)


def measure_apart(command: Sequence[str], variant: str, mode: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    words = [*command, variant, mode]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(output.splitlines()[-1])
    print(f"{mode}/{variant}: {result}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    sizes = command_line(__doc__, 4096).parse_args()
    if sizes.one:
        print(json.dumps(measure(*sizes.one, sizes)))
        return
    watch = Watch()
    text = table(measured_in_turns(__file__, VARIANTS, sizes), sizes, watch)
    print(text)
    if sizes.record:
        sizes.record.write_text(
            f"# Log-probabilities of response tokens\n\n`python tools/bench/logprob.py`\n\n{text}",
            encoding="ascii",
        )


if __name__ == "__main__":
    main()
