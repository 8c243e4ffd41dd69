"""Micro-batches in which responses to one prompt are neighbors: a forward pass computes the prompt
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_rl.policy.batches.packing_plan import Plan, plan_costs, require_fit
from megatron_rl.policy.batches.work_model import Integers, WorkModel
from megatron_rl.types import Sequences

Part = list[int]  # rows of one prompt


def plan_shared_prompts(
    batch: Sequences,
    rows: Sequence[int],
    *,
    data_parallel_size: int,
    tokens_per_microbatch: int,
    multiple: int,
    work: WorkModel | None = None,
) -> Plan:
    """data-parallel rank -> micro-batch -> rows, as ``plan_microbatches``, of the parts into which
    prompts' responses are cut.

    A part is some responses to one prompt and computes that prompt's tokens once. Large parts
    compute the fewest tokens, small ones can be balanced better over ranks: at most 1, 2, 4, ...
    responses a part are tried, and the plan whose slowest rank has the lowest cost is taken (of
    equal ones, the one with larger parts). Cost is the computed tokens, or their ``work``. The
    budget counts the prompt for every response: attention has the whole sequences in memory.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    lengths = batch.lengths.tolist()
    require_fit(lengths, rows, tokens_per_microbatch)
    costs = _PartCosts.of(batch, work)
    groups = _by_prompt(batch, rows)
    best_plan: Plan = []
    best_cost: int | None = None
    cuts: list[Part] = []
    for most in _halvings(max(map(len, groups), default=1)):
        previous = cuts
        cuts = []
        for group in groups:
            cuts += _parts(group, lengths, most, tokens_per_microbatch)
        if cuts == previous:
            continue
        part_costs = costs.of_parts(cuts)
        if best_cost is not None and sum(part_costs) >= best_cost * data_parallel_size:
            break  # smaller parts cost more still: no balance makes up for it
        plan = plan_costs(
            part_costs,
            range(len(cuts)),
            data_parallel_size=data_parallel_size,
            tokens_per_microbatch=tokens_per_microbatch,
            multiple=multiple,
            budgeted=[sum(map(lengths.__getitem__, part)) for part in cuts],
            level=work is not None,
        )
        slowest = max(_load(rank, part_costs) for rank in plan)
        if best_cost is None or slowest < best_cost:
            best_cost = slowest
            best_plan = [[_rows_of(parts, cuts) for parts in rank] for rank in plan]
    assert best_cost is not None
    return best_plan


@dataclass(frozen=True)
class _PartCosts:
    """Cost of a part = that of its prompt, once, and that of each response after the prompt."""

    of_prompt: Integers
    of_response: Integers

    @classmethod
    def of(cls, batch: Sequences, work: WorkModel | None) -> _PartCosts:
        prompts = batch.prompt_lengths.numpy()
        responses = batch.response_lengths.numpy()
        if work is None:
            return cls(prompts, responses)
        return cls(work.work(prompts), work.work(responses, context=prompts))

    def of_parts(self, parts: Sequence[Part]) -> list[int]:
        if not parts:
            return []
        sizes = np.array([len(part) for part in parts])
        starts = sizes.cumsum() - sizes
        rows = np.array(list(chain.from_iterable(parts)))
        prompts = self.of_prompt[rows[starts]]
        return (prompts + np.add.reduceat(self.of_response[rows], starts)).tolist()


def _by_prompt(batch: Sequences, rows: Sequence[int]) -> list[list[int]]:
    """``rows`` by prompt, prompts in order of appearance."""
    assert batch.prompt_index is not None
    groups: dict[int, list[int]] = {}
    for row, prompt in zip(rows, batch.prompt_index[list(rows)].tolist(), strict=True):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


def _load(microbatches: Sequence[Sequence[int]], part_costs: Sequence[int]) -> int:
    """Cost of all parts of a rank."""
    return sum(part_costs[part] for part in chain.from_iterable(microbatches))


def _rows_of(numbers: Sequence[int], parts: Sequence[Part]) -> list[int]:
    return [row for number in sorted(numbers) for row in parts[number]]


def _halvings(number: int) -> Iterator[int]:
    while number > 1:
        yield number
        number = -(-number // 2)
    yield 1


def _parts(group: Sequence[int], lengths: Sequence[int], most: int, budget: int) -> Iterator[Part]:
    """``group`` cut into runs of at most ``most`` rows that keep within the budget where they have
    two rows or more."""
    part: Part = []
    tokens = 0
    for row in group:
        if part and (len(part) == most or tokens + lengths[row] > budget):
            yield part
            part = []
            tokens = 0
        part.append(row)
        tokens += lengths[row]
    yield part
