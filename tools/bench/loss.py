"""Time and memory of credit and loss at scale, beside padded matrices for the same method.

    python tools/bench/loss.py --responses 1000000 --tokens 8000000

Two sizes: ``credit`` over --responses rows in groups of 8, and ``loss`` with its backward over
--tokens tokens in responses of uneven length. The padded formulation holds a [responses, longest]
matrix with a mask, loops over groups in Python for the advantages and averages each row: the usual
way elsewhere, written plainly here. Its size is --padded-responses, so that it ends. Memory is the
highest resident set of a child process for each case, less that of a child which only imports
torch. The cases take turns in rounds; medians and quartiles of all repeats.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from machine import Watch, description, in_turns, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch, load_method
from megatron_rl.loss.segments import group_accuracy

GROUP = 8
DEFAULT_METHODS = (
    "grpo,apo,a_grae,mapo,durian,krpo,grpo_lead,reinforce_pp,pass_at_k,gspo,cispo,dapo"
)


def responses(num: int, mean_tokens: int) -> ResponseBatch:
    """Groups of 8 with mixed outcomes.

    Lengths are exponential (long tail), at least 1 token, cut at 8 times the mean.
    """
    source = torch.Generator().manual_seed(0)
    correct = torch.rand(num, generator=source) < 0.4
    drawn = torch.empty(num).exponential_(1 / mean_tokens, generator=source)
    lengths = drawn.clamp(1, 8 * mean_tokens).long()
    logprobs = -torch.rand(num, generator=source)
    ids = torch.arange(num) // GROUP
    return ResponseBatch(
        0.9 * correct + 0.1,
        correct,
        ids,
        lengths,
        columns={
            "mean_logprobs": logprobs,
            "visual_entropy": (ids % 97).float(),
            "progress": torch.tensor(0.5),
            "prompt_confidence": logprobs.exp(),
            "response_confidence": logprobs.exp(),
            "visits": ids % 3,
            "history_mean": torch.full((num,), 0.4),
            "history_var": torch.full((num,), 0.2),
        },
    )


def tokens(batch: ResponseBatch, credit: Credit, method: Method) -> TokenBatch:
    """With entropies where the loss reads them; without, every loss would log their mean."""
    ids = torch.repeat_interleave(torch.arange(batch.rewards.numel()), batch.response_tokens)
    source = torch.Generator().manual_seed(1)
    old = -torch.rand(ids.numel(), generator=source)
    others = torch.rand(ids.numel(), 4, generator=source)
    moved = torch.zeros(batch.rewards.numel()).index_add(0, ids, -0.02 * old)
    of_tokens = {
        "entropy": others[:, 0],
        "topk_logprobs": -others[:, 1:],
        "is_argmax": others[:, 0] < 0.5,
        "nucleus_entropy": others[:, 0],
        "masked_logprobs": 1.1 * old,
    }
    return TokenBatch(
        logprobs=(0.98 * old).requires_grad_(),
        old_logprobs=old,
        response_index=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        advantages=credit.advantages,
        kl_weights=credit.kl_weights,
        ref_logprobs=1.02 * old,
        correct=batch.correct,
        group_ids=batch.group_ids,
        token_columns={name: of_tokens[name] for name in method.reads if name in of_tokens},
        columns={
            "group_accuracy": group_accuracy(batch.correct, batch.group_ids),
            "log_ratio_sums": moved,
            "is_demonstration": batch.correct,
            "end_logprobs": batch.rewards - 9,
            "end_index": torch.arange(batch.rewards.numel()),
            "end_start": torch.tensor(-9.0),
            "peaks": torch.tensor([0.8, 0.2 * ids.numel(), 0.9, 0.8]),
        },
    )


def padded_credit(batch: ResponseBatch) -> torch.Tensor:
    """GRPO's advantages with a Python loop over groups."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    advantages = torch.zeros_like(batch.rewards)
    for rows in members.values():
        rewards = batch.rewards[rows]
        advantages[rows] = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    return advantages


def padded_loss(
    batch: TokenBatch, lengths: torch.Tensor, clip: float, coef: float
) -> Callable[[], torch.Tensor]:
    """The function that is timed.

    The padded matrices are built before it, since a padded trainer holds them anyway.
    """
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(values: torch.Tensor) -> torch.Tensor:
        matrix = torch.zeros(mask.shape)
        matrix[mask] = values.detach()
        return matrix

    assert batch.ref_logprobs is not None
    new = padded(batch.logprobs).requires_grad_()
    old = padded(batch.old_logprobs)
    ref = padded(batch.ref_logprobs)
    advantages = batch.advantages[:, None]
    ones = mask.float()

    def run() -> torch.Tensor:
        ratio = (new - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        divergence = (ref - new).exp() - (ref - new) - 1
        loss = (((policy + coef * divergence) * ones).sum(1) / ones.sum(1)).mean()
        loss.backward()
        return loss.detach()

    return run


def timed(repeats: int, function: Callable[[], object]) -> dict[str, list[float]]:
    """Wall-clock and processor seconds (all threads) of every repeat after a first one."""
    function()
    walls = []
    processors = []
    for _ in range(repeats):
        wall = time.perf_counter()
        processor = time.process_time()
        function()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return {"wall_s": walls, "processor_s": processors}


def case(
    name: str, num: int, mean_tokens: int, method_name: str, repeats: int
) -> dict[str, list[float]]:
    """One measurement."""
    method = load_method(method_name, response_limit=8 * mean_tokens)
    batch = responses(num, mean_tokens)
    if name == "credit":
        return timed(repeats, lambda: method.credit(batch))
    if name == "padded_credit":
        # In groups without spread the plain std is 1e-8, not 0, and its advantages are up to 0.01.
        torch.testing.assert_close(
            padded_credit(batch), method.credit(batch).advantages, rtol=1e-4, atol=2e-2
        )
        return timed(repeats, lambda: padded_credit(batch))
    data = tokens(batch, method.credit(batch), method)
    if name == "padded_loss":
        run = padded_loss(data, batch.response_tokens, 0.2, 1e-3)
        torch.testing.assert_close(run(), method.loss(data).loss.detach(), rtol=1e-3, atol=1e-5)
        return timed(repeats, run)
    return timed(repeats, lambda: method.loss(data).loss.backward())


def child(*arguments: object) -> dict[str, list[float]]:
    """What the case measured, in a process of its own, with its highest resident set in GiB."""
    result = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


def show(
    results: dict[tuple[str, int, str], list[dict[str, list[float]]]],
    mean_tokens: int,
    floor: float,
) -> None:
    """A line for each case, all rounds together."""
    print("| case | method | size | wall s | processor s | GiB |\n|---|---|---|---|---|---|")
    for (name, rows, method), rounds in results.items():
        wall = spread([value for turn in rounds for value in turn["wall_s"]])
        processor = spread([value for turn in rounds for value in turn["processor_s"]])
        peak = spread([turn["peak_gib"][0] - floor for turn in rounds])
        size = f"{rows} responses" if "credit" in name else f"about {rows * mean_tokens} tokens"
        print(
            f"| {name} | {method} | {size} | {wall.text()} | {processor.text()} |"
            f" {peak.median:.2f} |",
            flush=True,
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--mean-tokens", type=int, default=400)
    parser.add_argument("--padded-responses", type=int, default=20_000)
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    rounds = "turns of every case, each in a process of its own"
    parser.add_argument("--rounds", type=int, default=2, help=rounds)
    parser.add_argument("--repeats", type=int, default=3, help="in each of them")
    parser.add_argument(
        "--case", nargs=4, metavar=("NAME", "ROWS", "MEAN_TOKENS", "METHOD"), help=argparse.SUPPRESS
    )
    return parser


def measure(options: argparse.Namespace) -> None:
    """The one case of a child process: its measurements and its highest resident set, as JSON."""
    name, rows, mean_tokens, method = options.case
    found = {}
    if name != "nothing":
        found = case(name, int(rows), int(mean_tokens), method, options.repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**found, "peak_gib": [peak]}))


def all_cases(options: argparse.Namespace) -> list[tuple[str, int, str]]:
    """(what, responses, method): every method at full size, then GRPO beside padded matrices."""
    methods = options.methods.split(",")
    cases = [("credit", options.responses, method) for method in methods]
    cases += [("loss", options.tokens // options.mean_tokens, method) for method in methods]
    padded = ("padded_credit", "credit", "padded_loss", "loss")
    return cases + [(name, options.padded_responses, "grpo") for name in padded]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    if options.case:
        measure(options)
        return 0
    try:
        for method in options.methods.split(","):
            load_method(method, response_limit=8)
    except ValueError as error:
        parser.error(f"--methods: {error}")
    watch = Watch()
    floor = child("--case", "nothing", 1, 1, "grpo")["peak_gib"][0]
    repeats = ("--repeats", options.repeats)
    variants = {
        (name, rows, method): partial(
            child, *repeats, "--case", name, rows, options.mean_tokens, method
        )
        for name, rows, method in all_cases(options)
    }
    results = in_turns(variants, options.rounds)
    machine = f"{description()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"{machine}; {watch.load()}.")
    print(
        f"Median (quartiles) of {options.rounds} rounds x {options.repeats} repeats; memory above"
        f" import {floor:.2f} GiB.\n"
    )
    show(results, options.mean_tokens, floor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
