"""Token rows on their way between ranks: a few flat buffers in place of objects.

Every rank knows the lengths of all rows, so every rank knows without being told which rank holds
the tokens of which row, before and after they travel.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int, Shaped

from megatron_rl.data.token_rows import Ranks, RowNumbers, TokenRows
from megatron_rl.models.experts import not_given
from megatron_rl.passes import EXPERTS
from megatron_rl.rollouts.rows.experience import Passage, Response, Responses
from megatron_rl.runtime.launch import World
from megatron_rl.types import APPENDED, PLACES, Completion, Prompt, VersionSpan


@dataclass(frozen=True)
class Route:
    """Where all rows of a step travel. ``lengths``: response tokens of each row; ``source``: the
    rank that has it; ``target``: the rank that is to have it.

    Example, two ranks that have sampled two rows each, and exchange one each:
    ``Route(lengths=[5, 7, 2, 3], source=[0, 0, 1, 1], target=[0, 1, 0, 1])``.
    """

    lengths: Int[np.ndarray, " rows"]
    source: Ranks
    target: Ranks

    def outgoing(self, rank: int) -> Int[np.ndarray, " sent"]:
        """Rows that ``rank`` sends, sorted by target, for one target in canonical order."""
        rows = np.flatnonzero(self.source == rank)
        return rows[np.argsort(self.target[rows], kind="stable")]

    def incoming(self, rank: int) -> Int[np.ndarray, " received"]:
        """Rows that ``rank`` receives, sorted by source, from one source in canonical order."""
        rows = np.flatnonzero(self.target == rank)
        return rows[np.argsort(self.source[rows], kind="stable")]

    def tokens_to(self, rank: int, num_ranks: int) -> list[int]:
        """Tokens that ``rank`` sends to each rank."""
        return _tokens(self.target, self.lengths, self.source == rank, num_ranks)

    def tokens_from(self, rank: int, num_ranks: int) -> list[int]:
        """Tokens that ``rank`` receives from each rank."""
        return _tokens(self.source, self.lengths, self.target == rank, num_ranks)


def _tokens(peer: Ranks, lengths: Ranks, rows: np.ndarray, num_ranks: int) -> list[int]:
    # Weights are summed as floats; numbers of tokens are exact in them.
    return np.bincount(peer[rows], lengths[rows], num_ranks).astype(int).tolist()


def owning_ranks(
    plan: Sequence[Sequence[Sequence[int]]], num_rows: int, owners: Sequence[int]
) -> Ranks:
    """The rank that trains each row. ``plan``: micro-batches by data-parallel rank, which name
    every row at most once; ``owners``: the rank that takes the rows of a data-parallel rank. A row
    that is not named goes to its place modulo the owners.

    Example, of two data-parallel ranks whose first processes are ranks 0 and 4:
    ``owning_ranks([[[0, 2]], [[1]]], 3, [0, 4]) == [0, 4, 0]``.
    """
    result = np.asarray(owners, dtype=np.int64)[np.arange(num_rows) % len(owners)]
    for owner, microbatches in zip(owners, plan, strict=True):
        for rows in microbatches:
            result[rows] = owner
    return result


def token_rows(
    rows: RowNumbers,
    completions: Sequence[Completion],
    *,
    with_sampled: bool = False,
    num_kept: int = 0,
    num_likely: int = 0,
) -> TokenRows:
    """The rows that were sampled here; columns ``token_ids`` (int32) and ``sampler_logprobs``
    (float32). ``with_sampled``: adds ``sampled`` (bool), on all ranks or on none; ``num_kept``:
    adds ``kept`` (int32) with so many slots per token, unused for a response without kept tokens.
    ``num_likely``: adds ``likely`` and ``sampler_likely_logprobs`` in the same way."""
    ids = [np.asarray(each.token_ids, dtype=np.int32) for each in completions]
    logprobs = [np.asarray(each.sampler_logprobs, dtype=np.float32) for each in completions]
    columns = {
        "token_ids": np.concatenate([np.empty(0, np.int32), *ids]),
        "sampler_logprobs": np.concatenate([np.empty(0, np.float32), *logprobs]),
    }
    if with_sampled:
        columns["sampled"] = token_versions(completions) != APPENDED
    wanted = {"kept": num_kept, "likely": num_likely, "sampler_likely_logprobs": num_likely}
    for name, num_places in wanted.items():
        if num_places:
            columns[name] = _places(completions, name, num_places)
    return TokenRows(
        rows=np.asarray(rows, dtype=np.int64),
        lengths=np.array([len(values) for values in ids], dtype=np.int64),
        columns=columns,
    )


def expert_rows(
    rows: RowNumbers, completions: Sequence[Completion], prompts: Sequence[Prompt], width: int
) -> TokenRows:
    """The experts of all tokens of the rows that were sampled here, as ``Responses.experts``;
    ``not_given`` for what no engine has computed. ``prompts``: of these rows."""
    given = []
    for one, prompt in zip(completions, prompts, strict=True):
        num_tokens = len(prompt.token_ids) + len(one.token_ids)
        experts = not_given(num_tokens, width) if one.experts is None else one.experts
        assert experts.shape == (num_tokens, width), "of prompt and response"
        given.append(experts)
    return TokenRows(
        rows=np.asarray(rows, dtype=np.int64),
        lengths=np.array([len(experts) for experts in given], dtype=np.int64),
        columns={EXPERTS: np.concatenate([not_given(0, width), *given])},
    )


def _places(
    completions: Sequence[Completion], name: str, num_places: int
) -> Shaped[np.ndarray, "tokens places"]:
    """A field of ``PLACES`` of all responses, one after the other."""
    typecode, free = PLACES[name]
    parts = [np.empty((0, num_places), typecode)]
    for one in completions:
        values = getattr(one, name)
        shape = (len(one.token_ids), num_places)
        is_free = values is None
        parts.append(np.full(shape, free, typecode) if is_free else np.reshape(values, shape))
    return np.concatenate(parts)


def token_versions(completions: Sequence[Completion]) -> Int[np.ndarray, " tokens"]:
    """The version of the weights that sampled each token, one response after the other."""
    versions = []
    lengths = []
    for one in completions:
        begin = 0
        for span in one.spans:
            versions.append(span.version)
            lengths.append(span.end - begin)
            begin = span.end
    return np.repeat(np.array(versions, dtype=np.int32), np.array(lengths, dtype=np.int64))


def exchange_rows(held: TokenRows, route: Route, world: World) -> TokenRows:
    """Collective: the rows whose target is this rank, sorted by source, then in canonical order.

    Each row goes to its target alone. Sizes follow from the route, so nothing but values travels:
    8 bytes a token for 32-bit ids and logprobs. All ranks hold columns of the same names and
    dtypes, in the same order, also those without a row. The lengths of the route are those of
    ``held``: of responses, or of whole sequences.
    """
    outgoing = held.take(route.outgoing(world.rank))
    if world.size == 1:
        return outgoing
    incoming = route.incoming(world.rank)
    sent = route.tokens_to(world.rank, world.size)
    received = route.tokens_from(world.rank, world.size)
    columns = {}
    for name, values in outgoing.columns.items():
        buffer = torch.from_numpy(np.empty((sum(received), *values.shape[1:]), dtype=values.dtype))
        # Outputs come before inputs in the arguments, tensors and sizes alike.
        own = torch.from_numpy(values)
        dist.all_to_all_single(buffer, own, received, sent, group=world.control_group)
        columns[name] = buffer.numpy()
    return TokenRows(incoming, route.lengths[incoming], columns)


def gathered_on_main(
    tokens: TokenRows,
    responses: Responses,
    world: World,
    lengths: Int[np.ndarray, " rows"] | None = None,
) -> TokenRows:
    """Collective: all rows of ``responses`` in canonical order, on rank 0; none on the others.
    ``tokens``: the rows on this rank, with any columns; ``lengths``: tokens of each row, where
    these are not those of responses."""
    main = np.zeros(len(responses), dtype=np.int64)
    route = Route(responses.lengths if lengths is None else lengths, responses.holders, main)
    everything = exchange_rows(tokens, route, world)
    return everything.take(range(len(responses))) if world.is_main else everything


def on_main(
    responses: Responses, rows: RowNumbers, decode: Callable[[Sequence[int]], str], world: World
) -> list[Response] | None:
    """Collective: the responses ``rows``, in this order, whole and with their texts, on rank 0 for
    a user's code and for logs; None on the other ranks, which send what they have of them."""
    chosen = responses.take(rows)
    tokens = gathered_on_main(chosen.tokens, chosen, world)
    if not world.is_main:
        return None
    result = []
    flags = tokens.views("sampled") if "sampled" in tokens.columns else None
    for row, (ids, logprobs) in enumerate(
        zip(tokens.views("token_ids"), tokens.views("sampler_logprobs"), strict=True)
    ):
        completion = Completion(
            array("i", ids.tobytes()),
            array("f", logprobs.tobytes()),
            bool(chosen.truncated[row]),
            int(chosen.weight_versions[row]),
            () if flags is None else spans_of(flags[row], int(chosen.weight_versions[row])),
        )
        text = decode(ids.tolist())
        ends = [span.end for span in completion.spans]
        passages = [
            Passage(span.version != APPENDED, decode(ids[begin : span.end].tolist()))
            for span, begin in zip(completion.spans, [0, *ends], strict=False)
        ]
        result.append(Response(chosen.prompts[row], completion, text, chosen.scores[row], passages))
    return result


def spans_of(sampled: Bool[np.ndarray, " tokens"], version: int) -> tuple[VersionSpan, ...]:
    """True True False of version 4 are ``(VersionSpan(4, 2), VersionSpan(APPENDED, 3))``."""
    if not len(sampled):
        return ()
    ends = [*(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(sampled)]
    return tuple(VersionSpan(version if sampled[end - 1] else APPENDED, end) for end in ends)
