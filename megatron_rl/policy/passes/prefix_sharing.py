"""Micro-batches in which responses to one prompt are neighbors: a forward pass computes the prompt,
or encodes its images, once."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from megatron_rl.policy.batches.packing_plan import Plan, PlanRule, plan_costs, require_fit
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.types import Sequences

Part = list[int]  # rows of one prompt


def plan_shared_prompts(
    batch: Sequences, rows: Sequence[int], rule: PlanRule, *, only_images: bool = False
) -> Plan:
    """data-parallel rank -> micro-batch -> rows, as ``plan_microbatches``, of the parts into which
    prompts' responses are cut.

    A part is some responses to one prompt and computes that prompt's tokens once. Large parts
    compute the fewest tokens, small ones can be balanced better over ranks: at most 1, 2, 4, ...
    responses a part are tried, and the plan whose slowest rank has the least work is taken (of
    equal ones, the one with larger parts). The budget counts the prompt for every response:
    attention has the whole sequences in memory.

    ``only_images``: every response computes the prompt's tokens itself, and a part encodes the
    images once, for which it is charged the work of one more prompt.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    lengths = batch.lengths.tolist()
    require_fit(lengths, rows, rule.tokens_per_microbatch)
    groups = _by_prompt(batch, rows)
    best_plan: Plan = []
    best_cost: int | None = None
    cuts: list[Part] = []
    for most in _halvings(max(map(len, groups), default=1)):
        previous = cuts
        cuts = []
        for group in groups:
            cuts += _parts(group, lengths, most, rule.tokens_per_microbatch)
        if cuts == previous:
            continue
        costs = _costs(batch, rule.work, cuts, only_images)
        if best_cost is not None and sum(costs) >= best_cost * rule.data_parallel_size:
            break  # smaller parts cost more still: no balance makes up for it
        budgeted = [sum(map(lengths.__getitem__, part)) for part in cuts]
        plan = plan_costs(costs, range(len(cuts)), budgeted, rule)
        slowest = max(sum(costs[part] for part in chain.from_iterable(rank)) for rank in plan)
        if best_cost is None or slowest < best_cost:
            best_cost = slowest
            best_plan = [[_rows_of(parts, cuts) for parts in rank] for rank in plan]
    assert best_cost is not None
    return best_plan


def _costs(
    batch: Sequences, work: WorkModel, parts: Sequence[Part], only_images: bool
) -> list[int]:
    """Of each part the work of its prompt, once, and of responses after the prompt, or with it."""
    if not parts:
        return []
    prompts = batch.prompt_lengths.numpy()
    of_response = work.work(batch.response_lengths.numpy(), context=prompts)
    if only_images:
        of_response = work.work(batch.lengths.numpy())
    sizes = np.array([len(part) for part in parts])
    starts = sizes.cumsum() - sizes  # of each part, among the rows of all parts end to end
    rows = np.array(list(chain.from_iterable(parts)))
    of_prompt = work.work(prompts)[rows[starts]]
    return (of_prompt + np.add.reduceat(of_response[rows], starts)).tolist()


def _by_prompt(batch: Sequences, rows: Sequence[int]) -> list[list[int]]:
    """``rows`` by prompt, prompts in order of appearance."""
    assert batch.prompt_index is not None
    groups: dict[int, list[int]] = {}
    for row, prompt in zip(rows, batch.prompt_index[list(rows)].tolist(), strict=True):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


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
