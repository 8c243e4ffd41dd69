"""How well micro-batch plans fill and balance, and what a plan costs: python tools/bench/packing.py

Lengths are log-normal (median 400 tokens, sigma 1), cut at the longest sequence. Columns: real tokens as a share of the budget of all
micro-batches (what no plan could avoid in brackets), mean over largest tokens of a rank, the same of a micro-batch, seconds for a plan.
"""

from __future__ import annotations

import argparse
import math
import random
import time

from megatron_rl.data.packing import plan_microbatches

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="batches of each case; the table shows their mean")
    options = parser.parse_args()
    print("| rows | ranks | multiple | budget | of budget (bound) | rank balance | micro-batch balance | seconds |\n" + "|---" * 8 + "|")
    for case in CASES:
        results = [measure(seed, *case) for seed in range(options.seeds)]
        budget, bound, ranks, bins, seconds = (sum(column) / len(results) for column in zip(*results, strict=True))
        print(f"| {' | '.join(map(str, case[:4]))} | {budget:.3f} ({bound:.3f}) | {ranks:.4f} | {bins:.4f} | {seconds:.3f} |")


def measure(seed: int, num_rows: int, ranks: int, multiple: int, budget: int, longest: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    lengths = [min(longest, max(8, int(rng.lognormvariate(math.log(400), 1)))) for _ in range(num_rows)]
    begin = time.perf_counter()
    plan = plan_microbatches(lengths, range(num_rows), data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=multiple)
    seconds = time.perf_counter() - begin
    sums = [[sum(lengths[row] for row in part) for part in rank] for rank in plan]
    total, num_bins, step = sum(lengths), ranks * len(plan[0]), ranks * multiple
    fewest = -(-total // (budget * step)) * step
    largest_rank, largest_bin = max(map(sum, sums)), max(map(max, sums))
    return total / (num_bins * budget), total / (fewest * budget), total / (ranks * largest_rank), total / (num_bins * largest_bin), seconds


if __name__ == "__main__":
    main()
