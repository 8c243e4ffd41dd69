"""How many computed tokens are real, how evenly work is spread, and what a plan costs.

    python tools/bench/packing.py [--seeds 5]

Lengths are log-normal (median 400 tokens, sigma 1), cut at the longest sequence. Four tables:

Real tokens as a share of the tokens that pass through the model, whose difference is padding:
packed, for the lengths that context parallelism, sequence parallelism and FP8 ask for; beside it
the usual alternative, rows in their order in rectangles as wide as their longest row. Balance: mean
over largest of the ranks (the share of time they do not wait for each other), by tokens and by the
work of a 7B model (attention grows with the square of a length), of plans by tokens and of plans by
work, beside the alternative of an equal number of rows a rank. Fill: real tokens as a share of the
budget of all micro-batches, with the most that is possible when every rank runs equally many; what
is left is memory not used, no time.

Many ranks: processor seconds of one plan, median and quartiles of five, and the largest over the
mean work of the ranks, of plans by tokens and by work. Responses are long (log-normal, sigma 1,
median an eighth of the longest, which is the budget); in "shared prompts" 8 of them have one prompt
of 256 tokens.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence

import numpy as np
import torch
from gpu_model import table
from machine import Watch, description, spread

from megatron_rl.config.rules.hardware import BLOCK
from megatron_rl.policy.batches.microbatches import multiples, padded_lengths
from megatron_rl.policy.batches.packing_plan import plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes.prefix_sharing import plan_shared_prompts
from megatron_rl.types import SequenceBatch

# rows, data-parallel size, multiple, budget, longest sequence
CASES = (
    (64, 1, 1, 4096, 2048),
    (256, 2, 1, 8192, 4096),
    (512, 4, 1, 8192, 4096),
    (512, 4, 2, 8192, 4096),
    (1024, 8, 1, 16384, 8192),
    (4096, 8, 1, 16384, 8192),
    (8192, 16, 4, 32768, 16384),
)
RULES = {
    "plain": multiples(1, 1, False),
    "CP 4": multiples(4, 1, False),
    "TP 8, SP": multiples(1, 8, True),
    "TP 4, SP, FP8 tensorwise": multiples(1, 4, True, BLOCK["tensorwise"]),
    "TP 4, SP, FP8 blockwise": multiples(1, 4, True, BLOCK["blockwise"]),
}
# rows, data-parallel size, longest sequence, which is the budget
MANY_RANKS = (
    (1024, 64, 32768),
    (8192, 64, 16384),
    (8192, 1024, 16384),
    (16384, 64, 16384),
    (16384, 1024, 16384),
)
PROMPT_TOKENS = 256
PLAN_REPEATS = 5
WORK = WorkModel.of_sizes(matrix_parameters=7_070_000_000, num_layers=28, attention_width=3584)
Plan = list[list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="batches of each case; the tables show their mean"
    )
    options = parser.parse_args()
    watch = Watch()
    tables: list[list[dict[str, object]]] = [[], [], []]
    for rows, ranks, multiple, budget, longest in CASES:
        case = {"rows": rows, "ranks": ranks, "multiple": multiple, "budget": budget}
        results = [
            measure(seed, rows, ranks, multiple, budget, longest) for seed in range(options.seeds)
        ]
        for number, found in enumerate(tables):
            keys = results[0][number]
            means = {
                key: sum(result[number][key] for result in results) / len(results) for key in keys
            }
            found.append(case | {key: f"{value:.4f}" for key, value in means.items()})
    print(
        f"{description()}; {watch.load()}. Load matters to plan_s alone; the rest are counts, equal"
        " on every machine.\n"
    )
    print("\n\n".join(map(table, [*tables, [many_ranks(*case) for case in MANY_RANKS]])))


def measure(
    seed: int, num_rows: int, ranks: int, multiple: int, budget: int, longest: int
) -> list[dict[str, float]]:
    """The rows of the three tables for one batch."""
    rng = random.Random(seed)
    lengths = [
        min(longest, max(8, int(rng.lognormvariate(math.log(400), 1)))) for _ in range(num_rows)
    ]
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=multiple)
    begin = time.process_time()
    plan = plan_microbatches(lengths, range(num_rows), **sizes)
    seconds = time.process_time() - begin
    leveled = plan_microbatches(lengths, range(num_rows), work=WORK, **sizes)
    in_order = rectangles(lengths, ranks, budget)
    total = sum(lengths)
    num_bins = ranks * len(plan[0])
    step = ranks * multiple
    fewest = -(-total // (budget * step)) * step
    rectangle_tokens = sum(
        len(part) * max(lengths[row] for row in part) for rank in in_order for part in rank
    )
    real = {name: total / computed(plan, lengths, rule) for name, rule in RULES.items()} | {
        "rectangles": total / rectangle_tokens
    }
    work = WORK.work(np.array(lengths)).tolist()
    evenness = {
        "tokens": balance(plan, lengths),
        "7B work": balance(plan, work),
        "by work: 7B work": balance(leveled, work),
        "equal rows: tokens": balance(in_order, lengths),
        "equal rows: 7B work": balance(in_order, work),
    }
    largest_bin = max(sum(lengths[row] for row in part) for rank in plan for part in rank)
    fill = {
        "fill": total / (num_bins * budget),
        "possible": total / (fewest * budget),
        "mean over largest micro-batch": total / (num_bins * largest_bin),
        "plan_s": seconds,
    }
    return [real, evenness, fill]


def many_ranks(num_rows: int, ranks: int, longest: int) -> dict[str, object]:
    """A line of the last table."""
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(math.log(longest / 8), 1.0, num_rows)
    whole = np.clip(lengths, 2 * PROMPT_TOKENS, longest).astype(np.int64)
    rows = range(num_rows)
    batch = SequenceBatch(
        torch.zeros(0, dtype=torch.long),
        torch.full((num_rows,), PROMPT_TOKENS),
        torch.from_numpy(whole) - PROMPT_TOKENS,
        torch.arange(num_rows) // 8,
    )
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=longest, multiple=1)
    plans = {
        "by tokens": lambda: plan_microbatches(whole.tolist(), rows, **sizes),
        "by work": lambda: plan_microbatches(whole.tolist(), rows, work=WORK, **sizes),
        "shared prompts": lambda: plan_shared_prompts(batch, rows, **sizes),
        "shared prompts, by work": lambda: plan_shared_prompts(batch, rows, work=WORK, **sizes),
    }
    line: dict[str, object] = {"rows": num_rows, "ranks": ranks, "budget": longest}
    work = WORK.work(whole)
    for name, make in plans.items():
        seconds = []
        for _ in range(PLAN_REPEATS):
            begin = time.process_time()
            plan = make()
            seconds.append(time.process_time() - begin)
        line[f"{name} s"] = spread(seconds).text(3)
        if not name.startswith("shared"):
            line[f"{name} imbalance"] = f"{1 / balance(plan, work.tolist()):.4f}"
    return line


def rectangles(lengths: Sequence[int], ranks: int, budget: int) -> Plan:
    """Rows in their order, equally many a rank, cut into micro-batches whose rows times longest row
    stay within the budget."""
    plan: Plan = []
    for rank in range(ranks):
        parts: list[list[int]] = [[]]
        for row in range(rank * len(lengths) // ranks, (rank + 1) * len(lengths) // ranks):
            widest = max(lengths[other] for other in [*parts[-1], row])
            if (len(parts[-1]) + 1) * widest > budget:
                parts.append([])
            parts[-1].append(row)
        plan.append(parts)
    return plan


def computed(plan: Plan, lengths: Sequence[int], rule: object) -> int:
    """Tokens that pass through the model, padding included."""
    ones = torch.ones(len(lengths), dtype=torch.long)
    batch = SequenceBatch(
        torch.zeros(sum(lengths), dtype=torch.long), ones, torch.tensor(lengths) - ones
    )
    return sum(int(padded_lengths(batch, part, rule).sum()) for rank in plan for part in rank)


def balance(plan: Plan, cost: Sequence[float]) -> float:
    """Mean over largest of the ranks' costs."""
    costs = [sum(cost[row] for part in rank for row in part) for rank in plan]
    return sum(costs) / len(costs) / max(costs)


if __name__ == "__main__":
    main()
