"""Time and memory of credit and loss at scale, beside the padded-matrix formulation of the same method.

    python tools/bench/loss.py --responses 1000000 --tokens 8000000

Two sizes: ``credit`` over --responses rows in groups of 8, and ``loss`` with its backward over --tokens tokens in responses of
uneven length. The padded formulation holds a [responses, longest] matrix with a mask, loops over groups in Python for the
advantages and averages each row: the usual way elsewhere, written plainly here. Its size is --padded-responses, so that it ends.
Memory is the highest resident set of a child process for each case, less that of a child which only imports torch.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.loss import Credit, ResponseBatch, TokenBatch, load_method

GROUP = 8


def responses(num: int, mean_tokens: int) -> ResponseBatch:
    """Groups of 8 with mixed outcomes; lengths are exponential (long tail), at least 1 token, cut at 8 times the mean."""
    source = torch.Generator().manual_seed(0)
    correct = torch.rand(num, generator=source) < 0.4
    lengths = torch.empty(num).exponential_(1 / mean_tokens, generator=source).clamp(1, 8 * mean_tokens).long()
    logprobs = -torch.rand(num, generator=source)
    ids = torch.arange(num) // GROUP
    return ResponseBatch(0.9 * correct + 0.1, correct, ids, lengths, mean_logprobs=logprobs, visual_entropy=(ids % 97).float())


def tokens(batch: ResponseBatch, credit: Credit) -> TokenBatch:
    ids = torch.repeat_interleave(torch.arange(batch.rewards.numel()), batch.response_tokens)
    old = -torch.rand(ids.numel(), generator=torch.Generator().manual_seed(1))
    return TokenBatch(
        logprobs=(0.98 * old).requires_grad_(), old_logprobs=old, response_ids=ids, loss_mask=torch.ones_like(ids, dtype=torch.bool),
        advantages=credit.advantages, kl_weights=credit.kl_weights, ref_logprobs=1.02 * old,
    )  # fmt: skip


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


def padded_loss(batch: TokenBatch, lengths: torch.Tensor, clip: float, coef: float) -> Callable[[], torch.Tensor]:
    """The padded matrices are built first, since a padded trainer holds them anyway; the returned function is what is timed."""
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(values: torch.Tensor) -> torch.Tensor:
        matrix = torch.zeros(mask.shape)
        matrix[mask] = values.detach()
        return matrix

    assert batch.ref_logprobs is not None
    new, old, ref = padded(batch.logprobs).requires_grad_(), padded(batch.old_logprobs), padded(batch.ref_logprobs)
    advantages, ones = batch.advantages[:, None], mask.float()

    def run() -> torch.Tensor:
        ratio = (new - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        divergence = (ref - new).exp() - (ref - new) - 1
        loss = (((policy + coef * divergence) * ones).sum(1) / ones.sum(1)).mean()
        loss.backward()
        return loss.detach()

    return run


def best_of(repeats: int, function: Callable[[], object]) -> str:
    """Least wall-clock and least processor seconds (all threads), which may come from different repeats."""
    walls, processors = [], []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        function()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return f"{min(walls):.2f}|{min(processors):.2f}"


def case(name: str, num: int, mean_tokens: int, method_name: str, repeats: int) -> str:
    """One measurement: a line of the record."""
    method = load_method(method_name, response_limit=8 * mean_tokens)
    batch = responses(num, mean_tokens)
    if name == "credit":
        return best_of(repeats, lambda: method.credit(batch))
    if name == "padded_credit":
        # In groups without spread the plain std is 1e-8, not 0, and its advantages are up to 0.01.
        torch.testing.assert_close(padded_credit(batch), method.credit(batch).advantages, rtol=1e-4, atol=2e-2)
        return best_of(repeats, lambda: padded_credit(batch))
    data = tokens(batch, method.credit(batch))
    if name == "padded_loss":
        run = padded_loss(data, batch.response_tokens, 0.2, 1e-3)
        torch.testing.assert_close(run(), method.loss(data).loss.detach(), rtol=1e-3, atol=1e-5)
        return best_of(repeats, run)
    return best_of(repeats, lambda: method.loss(data).loss.backward())


def child(*arguments: object) -> tuple[str, float]:
    """(what the case printed, highest resident set in GiB)."""
    result = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True, check=True)
    value, peak = result.stdout.split()
    return value, float(peak)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--mean-tokens", type=int, default=400)
    parser.add_argument("--padded-responses", type=int, default=20_000)
    parser.add_argument("--methods", default="grpo,apo,a_grae,mapo,durian,krpo,grpo_lead,reinforce_pp,pass_at_k,gspo,cispo,dapo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=4, metavar=("NAME", "ROWS", "MEAN_TOKENS", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        name, rows, mean_tokens, method = options.case
        value = "-|-" if name == "nothing" else case(name, int(rows), int(mean_tokens), method, options.repeats)
        print(value, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return 0
    _, floor = child("--case", "nothing", 1, 1, "grpo")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; best of {options.repeats}; memory above import {floor:.2f} GiB")
    print("| case | method | size | wall s | processor s | GiB |\n|---|---|---|---|---|---|")
    rows_of_tokens = options.tokens // options.mean_tokens
    cases = [("credit", options.responses, method) for method in options.methods.split(",")]
    cases += [("loss", rows_of_tokens, method) for method in options.methods.split(",")]
    cases += [(name, rows, "grpo") for name in ("padded_credit", "credit", "padded_loss", "loss") for rows in [options.padded_responses]]
    for name, rows, method in cases:
        seconds, peak = child("--repeats", options.repeats, "--case", name, rows, options.mean_tokens, method)
        size = f"{rows} responses" if "credit" in name else f"about {rows * options.mean_tokens} tokens"
        print(f"| {name} | {method} | {size} | {seconds.replace('|', ' | ')} | {peak - floor:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
