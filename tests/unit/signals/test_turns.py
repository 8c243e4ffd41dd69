"""Turns of responses, and their advantages, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.token_rows import TokenRows
from megatron_rl.passes import LocalBatch
from megatron_rl.rollouts.rows.experience import Responses, experience_of
from megatron_rl.signals import StepView
from megatron_rl.signals.turns import LaterTurns, RelativePlace, TurnAdvantages, turns_of
from megatron_rl.types import Prompt, Score

# Of each response: its prompt, its reward, and its tokens; what is below 0 was appended.
RESPONSES = [
    (0, 1.0, [5, 5, -1, -2, 6, 6]),
    (0, 0.0, [7, -1, -2, 5]),
    (0, 1.0, [9, 9, 9]),
    (1, 1.0, [5, -1, -2, 5, -3, 8, 8]),
    (1, 0.25, [3]),
]


class OneRank:
    def of_all_rows(self, rows: np.ndarray, values: np.ndarray, num_rows: int) -> np.ndarray:
        table = np.zeros((num_rows, values.shape[1]))
        table[rows] = values
        return table


def view(order: Sequence[int] = range(5)) -> StepView:
    """``order``: of the rows, as they lie on this rank."""
    prompts = [Prompt(f"p{group}", (1,), "", "toy") for group, _, _ in RESPONSES]
    lengths = np.array([len(ids) for _, _, ids in RESPONSES])
    ids = [np.array(RESPONSES[row][2], dtype=np.int32) for row in order]
    flat = np.concatenate(ids)
    held = TokenRows(np.array(order), lengths[list(order)], {"token_ids": flat})
    responses = Responses(
        prompts=prompts,
        group_ids=np.array([group for group, _, _ in RESPONSES]),
        lengths=lengths,
        truncated=np.zeros(5, dtype=bool),
        weight_versions=np.zeros(5, dtype=np.int64),
        scores=[Score(reward, False) for _, reward, _ in RESPONSES],
        tokens=held,
        holders=np.zeros(5, dtype=np.int64),
    )
    batch = sequence_batch([((1,), row.tolist()) for row in ids])
    local = LocalBatch(batch, [[0]], torch.tensor(list(order)))
    tokens = {"token_ids": flat, "sampled": flat > 0}
    return StepView(
        experience_of(responses), range(5), local, tokens, cast(Any, None), cast(Any, OneRank())
    )


def by_row(values: torch.Tensor, order: Sequence[int] = range(5)) -> dict[int, list[float]]:
    parts = values.split([len(RESPONSES[row][2]) for row in order])
    return {row: part.tolist() for row, part in zip(order, parts, strict=True)}


def test_turns_by_hand() -> None:
    found = turns_of(view())
    assert found.count.tolist() == [2, 2, 1, 3, 1]
    assert by_row(found.turn)[3] == [0, 0, 0, 1, 1, 2, 2]
    later = by_row(LaterTurns().after_rollout(view())["later_turns"])
    assert later == {
        0: [1, 1, 1, 1, 0, 0],
        1: [1, 1, 1, 0],
        2: [0, 0, 0],
        3: [2, 2, 2, 1, 1, 0, 0],
        4: [0],
    }


def test_relative_places_by_hand() -> None:
    """Row 3 has four sampled tokens; what is appended takes no part, whatever stands there."""
    for order in (range(5), [3, 0, 4, 2, 1]):
        found = by_row(RelativePlace().after_rollout(view(order))["relative_place"], order)
        sampled = {
            row: [place for place, one in zip(found[row], ids, strict=True) if one > 0]
            for row, (_, _, ids) in enumerate(RESPONSES)
        }
        thirds = [0, torch.tensor(1 / 3).item(), torch.tensor(2 / 3).item()]
        quarters = [0, 0.25, 0.5, 0.75]
        assert sampled == {0: quarters, 1: [0, 0.5], 2: thirds, 3: quarters, 4: [0]}


def test_turn_advantages_by_hand() -> None:
    """At gamma 1/2 the first turns of prompt 0 have returns 1/2, 0 and 1, and those behind -1 -2
    have 1 and 0. Of prompt 1 the first have 1/4 both; behind -1 -2, and behind -3, is one turn."""
    signal = TurnAdvantages(gamma=0.5, turn_norm="none")
    for order in (range(5), [3, 1, 0, 4, 2]):
        found = by_row(signal.after_rollout(view(order))["turn_advantages"], order)
        assert found[0] == [0, 0, 0, 0, 0.5, 0.5]
        assert found[1] == [-0.5, -0.5, -0.5, -0.5]
        assert found[2] == [0.5] * 3
        assert found[3] == [0] * 7 and found[4] == [0]
