"""Micro-batches in which the responses to one prompt stand together, so that a forward pass computes the prompt once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.data.packing import plan_microbatches, require_fit
from megatron_rl.types import SequenceBatch


def plan_shared_prompts(
    batch: SequenceBatch, rows: Sequence[int], *, data_parallel_size: int, tokens_per_microbatch: int, multiple: int
) -> list[list[list[int]]]:
    """data-parallel rank -> micro-batch -> rows, as ``plan_microbatches``, of the parts into which prompts' responses are cut.

    A part is some responses to one prompt and computes that prompt's tokens once. Large parts compute the fewest tokens, small ones
    can be balanced better over ranks: at most 1, 2, 4, ... responses a part are tried, and the plan whose slowest rank has the
    fewest tokens is taken (of equal ones, the one with larger parts). The budget counts the prompt for every response: attention
    has the whole sequences in memory.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    assert batch.prompt_ids is not None
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    whole = batch.lengths.tolist()
    require_fit(whole, rows, tokens_per_microbatch)
    members: dict[int, list[int]] = {}
    for row, prompt in zip(rows, batch.prompt_ids[list(rows)].tolist(), strict=True):
        members.setdefault(prompt, []).append(row)
    best: tuple[int, list[list[list[int]]]] | None = None
    sizes = dict(data_parallel_size=data_parallel_size, tokens_per_microbatch=tokens_per_microbatch, multiple=multiple)
    for most in _halvings(max(map(len, members.values()), default=1)):
        parts = [part for group in members.values() for part in _parts(group, whole, most, tokens_per_microbatch)]
        lengths = [prompts[part[0]] + sum(responses[row] for row in part) for part in parts]
        if best is not None and sum(lengths) >= best[0] * data_parallel_size:
            break  # smaller parts have more tokens still: no balance makes up for them
        plan = plan_microbatches(lengths, range(len(parts)), budgeted=[sum(whole[row] for row in part) for part in parts], **sizes)
        slowest = max(sum(lengths[part] for microbatch in rank for part in microbatch) for rank in plan)
        if best is None or slowest < best[0]:
            best = slowest, [[[row for part in sorted(microbatch) for row in parts[part]] for microbatch in rank] for rank in plan]
    assert best is not None
    return best[1]


def _halvings(number: int) -> Iterator[int]:
    while number > 1:
        yield number
        number = -(-number // 2)
    yield 1


def _parts(group: Sequence[int], lengths: Sequence[int], most: int, budget: int) -> Iterator[list[int]]:
    """``group`` cut into runs of at most ``most`` rows that keep within the budget where they have two rows or more."""
    part: list[int] = []
    for row in group:
        if part and (len(part) == most or sum(lengths[other] for other in part) + lengths[row] > budget):
            yield part
            part = []
        part.append(row)
    yield part
