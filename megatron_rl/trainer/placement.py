"""Token rows on their way to the ranks that work on them.

Every rank knows the lengths of all rows, so every rank computes the same plan of which
data-parallel rank works on which row, without communication. A row goes to the first rank of that
data-parallel rank, its owner, and from there only to those that hold other parts of this model.

The plan of a pass over all rows gives each row its owner for the step, where its scores stay. A
minibatch has a plan of its own: its rows are known only after the credit, and later epochs shuffle
the groups again. Rows that it places elsewhere are copied for that update, with their scores. That
keeps every pass balanced by its own plan, and costs at most 16 bytes per token and pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.passes import LocalBatch
from megatron_rl.protocols import BatchSharding
from megatron_rl.rollouts.rows.exchange import Route, exchange_rows, owning_ranks
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.runtime.launch import World

Plan = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Placed:
    """The rows that this rank works on in a pass: their tokens, and the batch that they form."""

    tokens: TokenRows
    local: LocalBatch


@dataclass(frozen=True)
class Placement:
    """Brings rows to the ranks that work on them. ``sharding``: the policy's."""

    sharding: BatchSharding
    world: World

    def to_owners(self, experience: Experience) -> Experience:
        """Collective: ``experience`` with tokens on their owners, and the batch of all rows."""
        responses = experience.responses
        plan = self.sharding.plan(experience.sequences, range(len(responses)))
        owners = owning_ranks(plan, len(responses), self.sharding.owners)
        route = Route(responses.lengths, responses.holders, owners)
        tokens = exchange_rows(responses.tokens, route, self.world)
        placed = self._placed(experience, plan, tokens, self._experts(experience, route))
        responses = replace(responses, tokens=placed.tokens, holders=owners, experts=None)
        experience = replace(experience, responses=responses, local=placed.local)
        given = placed.local.batch.experts
        return experience if given is None else experience.with_experts(given)

    def rebalanced_for(self, experience: Experience, rows: Sequence[int]) -> Placed:
        """Collective: the tokens and the batch for a pass over ``rows``, after ``to_owners``."""
        tokens = experience.scored_tokens
        local = experience.local
        assert local is not None, "rows come from their owners: call to_owners first"
        if len(rows) == len(experience.responses):
            return Placed(tokens, local)
        plan = self.sharding.plan(experience.sequences, rows)
        route = self._route(experience, plan, rows)
        stays = np.array_equal(route.source, route.target)
        experts = experience.responses.experts
        if not stays:
            tokens = exchange_rows(tokens, route, self.world)
            experts = self._experts(experience, route)
        return self._placed(experience, plan, tokens, experts, everywhere=stays)

    def of_all_rows(
        self, rows: Int[np.ndarray, " rows"], values: np.ndarray, num_rows: int
    ) -> Float[np.ndarray, "all_rows columns"]:
        """Collective: gathers ``values`` ``[rows, columns]``, which ranks have for the rows of a
        pass, from the owners of these rows; 0 for rows that are not in the pass."""
        num_told = len(rows) if self._owns else 0
        table = np.zeros((num_rows, values.shape[1]))
        for owned, of_owned in self.world.all_gather((rows[:num_told], values[:num_told])):
            table[owned] = of_owned
        return table

    def of_all_tokens(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " all_tokens"]:
        """Collective: gathers ``values`` of the tokens that ranks work on in a pass, each token
        once, in the order of the ranks."""
        own = values if self._owns else values[:0]
        return torch.from_numpy(np.concatenate(self.world.all_gather(own.numpy())))

    def _route(self, experience: Experience, plan: Plan, rows: Sequence[int]) -> Route:
        """From the owners of ``rows`` to where ``plan`` places them; other rows do not travel."""
        responses = experience.responses
        source = np.full(len(responses), -1)  # no rank
        source[rows] = responses.holders[rows]
        target = np.full(len(responses), -1)
        target[rows] = owning_ranks(plan, len(responses), self.sharding.owners)[rows]
        return Route(responses.lengths, source, target)

    def _experts(self, experience: Experience, route: Route) -> TokenRows | None:
        """Collective: sends the experts of tokens along ``route``; None: they were not recorded."""
        experts = experience.responses.experts
        if experts is None:
            return None
        # Prompt tokens have experts too.
        route = replace(route, lengths=experience.sequences.lengths.numpy())
        return exchange_rows(experts, route, self.world)

    def _placed(
        self,
        experience: Experience,
        plan: Plan,
        held: TokenRows,
        experts: TokenRows | None,
        *,
        everywhere: bool = False,
    ) -> Placed:
        """``held`` and ``experts``: the rows of the plan on their owners, or (``everywhere``) on
        all ranks that work on them."""
        microbatches = plan[self.sharding.data_rank]
        own = np.array(sorted(chain.from_iterable(microbatches)), dtype=np.int64)
        lengths = experience.responses.lengths[own]
        tokens = self._given(held, own, lengths, everywhere)
        if experts is not None:
            whole_lengths = experience.sequences.lengths.numpy()[own]
            experts = self._given(experts, own, whole_lengths, everywhere)
        batch = experience.batch_of(own, tokens, experts)
        # As positions in the batch, whose rows are in increasing order.
        places = [np.searchsorted(own, rows).tolist() for rows in microbatches]
        return Placed(tokens, LocalBatch(batch, places, torch.from_numpy(own)))

    def _given(
        self, held: TokenRows, own: np.ndarray, lengths: np.ndarray, everywhere: bool
    ) -> TokenRows:
        """The rows ``own`` of this rank; ``lengths``: how many tokens each has."""
        if everywhere:
            return held.take(own)
        if self._owns:
            tokens = held.take(own)
        else:
            # Not the owner: room for what the owner sends below.
            num_tokens = int(lengths.sum())
            columns = {
                name: np.empty((num_tokens, *values.shape[1:]), values.dtype)
                for name, values in held.columns.items()
            }
            tokens = TokenRows(own, lengths, columns)
        for values in tokens.columns.values():
            self.sharding.give(torch.from_numpy(values))
        return tokens

    @property
    def _owns(self) -> bool:
        return self.sharding.owners[self.sharding.data_rank] == self.world.rank
