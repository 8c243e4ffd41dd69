"""The turns of responses: how many follow, and their advantages among turns in the same state; and
the positions of tokens."""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_rl.loss.per_token.token_advantages import TurnNorm, advantages_of_turns
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


class TokenTurns(NamedTuple):
    """The turns of the responses on this rank."""

    count: Int[Tensor, " rows"]  # of each response
    # Of each token, from 0 on; what is appended belongs to the turn before it.
    turn: Int[Tensor, " tokens"]
    row: Int[Tensor, " tokens"]  # of each token, its response among those here
    begins: Bool[Tensor, " tokens"]  # whether a token is the first of its turn


def turns_of(view: StepView) -> TokenTurns:
    """Example: tokens that are sampled, appended, sampled of one response are of turns 0, 0, 1."""
    row, sampled = view.local.batch.response_index, view.loss_mask
    follows = torch.zeros_like(sampled)
    follows[1:] = sampled[:-1] & (row[1:] == row[:-1])
    begins = sampled & ~follows
    count = torch.bincount(row[begins], minlength=view.local.batch.num_responses)
    before = count.cumsum(0) - count  # turns of the rows above
    return TokenTurns(count, begins.cumsum(0) - before[row] - 1, row, begins)


@register_signal
class LaterTurns(Signal):
    """``later_turns``: how many turns of its response follow that of a token."""

    about = "the turns of responses"
    token_columns = ("later_turns",)
    over_turns = True

    def after_rollout(self, view: StepView) -> Columns:
        count, turn, row, _ = turns_of(view)
        return {"later_turns": count[row] - 1 - turn}


@register_signal
class RelativePlace(Signal):
    """``relative_place``: t / L, the sampled tokens before a token over all of its response."""

    about = "where each token stands in its response"
    token_columns = ("relative_place",)
    over_turns = True

    def after_rollout(self, view: StepView) -> Columns:
        row, sampled = view.local.batch.response_index, view.loss_mask.double()
        length = torch.zeros(view.local.batch.num_responses, dtype=sampled.dtype)
        length.index_add_(0, row, sampled)
        above = length.cumsum(0) - length  # tokens of the rows above
        before = sampled.cumsum(0) - sampled - above[row]
        return {"relative_place": (before / length[row].clamp(min=1)).float()}


@register_signal
class TurnAdvantages(Signal):
    """``turn_advantages``: A^S of the turn of each token, ``advantages_of_turns``.

    The state of a turn is what its prompt and the last answer of the environment say, token for
    token. Rewards are those of the rollout, before ``reward_shaping`` and KL.
    """

    about = "the turns of responses, and what each was told"
    token_columns = ("turn_advantages",)
    over_turns = True

    def __init__(self, *, gamma: float, turn_norm: TurnNorm) -> None:
        self._gamma = gamma
        self._norm: TurnNorm = turn_norm

    def after_rollout(self, view: StepView) -> Columns:
        experience, rows = view.experience, view.local.rows
        assert rows is not None
        turns = turns_of(view)
        of_rows = view.of_all_rows({"count": turns.count})["count"]
        # [rows here, turns], then of all rows: what was told before each turn.
        told = torch.zeros(len(turns.count), int(of_rows.max()), dtype=torch.int64)
        places = torch.arange(len(turns.row))
        last = torch.where(view.loss_mask, places, -1).cummax(0).values  # that was sampled
        for place in (turns.begins & (turns.turn > 0)).nonzero().flatten().tolist():
            ids = view.tokens["token_ids"][int(last[place - 1]) + 1 : place]
            told[turns.row[place], turns.turn[place]] = _number(ids)
        columns = {str(turn): column for turn, column in enumerate(told.unbind(1))}
        everything = torch.stack([*view.of_all_rows(columns).values()], 1)
        at, turn = (torch.arange(everything.shape[1]) < of_rows[:, None]).nonzero(as_tuple=True)
        states = torch.stack([experience.group_ids[at], everything[at, turn]], 1)
        _, numbers = states.unique(dim=0, return_inverse=True)
        found = torch.zeros(everything.shape, dtype=torch.float64)
        found[at, turn] = advantages_of_turns(
            experience.rewards.double()[at],
            of_rows[at] - 1 - turn,
            numbers,
            self._gamma,
            self._norm,
        )
        return {"turn_advantages": found[rows[turns.row], turns.turn].float()}


def _number(told: np.ndarray) -> int:
    """A number, not 0, for what was told; 52 bits, which a float64 holds."""
    digest = hashlib.blake2b(told.tobytes(), digest_size=8).digest()
    return 1 + (int.from_bytes(digest, "big") >> 12)
