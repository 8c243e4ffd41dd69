"""One micro-batch as this rank sees it: packed sequences, cut over context-parallel ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from megatron_rl.models.experts import NOT_GIVEN
from megatron_rl.policy.passes.attention import Packing
from megatron_rl.policy.passes.vision import VisionBatcher
from megatron_rl.runtime.device import to_device
from megatron_rl.types import SequenceBatch

_ONE = torch.tensor([1])
_DUMMY = SequenceBatch(_ONE, _ONE, token_ids=torch.zeros(2, dtype=torch.long))


@dataclass(frozen=True)
class Multiples:
    """What lengths must be multiples of."""

    sequence: int  # of each sequence, two chunks for every context rank
    # Of their sum, every tensor rank's share under sequence parallelism, and what the number format
    # asks of each rank's tokens.
    total: int


def multiples(
    context: int, tensor: int, sequence_parallel: bool, rank_tokens: int = 1
) -> Multiples:
    """The padding rules of a layout.

    ``rank_tokens``: what the tokens of one rank must be a multiple of (FP8: 16, 32 or 128).

    Examples: ``multiples(2, 2, True)`` is ``Multiples(sequence=4, total=4)``;
    ``multiples(2, 2, True, 16)`` has a total of 64.
    """
    sequence = 2 * context if context > 1 else 1
    ranks = 1
    if sequence_parallel:
        ranks = context * tensor
    elif rank_tokens > 1:
        ranks = context
    return Multiples(sequence, math.lcm(sequence, ranks * rank_tokens))


@dataclass(frozen=True)
class Microbatch:
    """Tokens of this context rank (t of them), and which of their states predict a response token.

    ``rows[i]`` is a place among the t tokens, ``targets[i]`` a token that follows it (several
    follow the end of a shared prompt), ``index[i]`` that token's place in the response-token layout
    of the batch (on the host, unlike the others). ``temperatures[i]`` divides the logits of that
    token; None: all have the policy's. ``kept[i]``, ``likely[i]``: see ``logprobs.Head``.
    ``places``: index of the t tokens in the batch, -1 for padding; ``in_response``: which of them
    belong to responses; both on the host. ``experts``: as in the batch. An empty micro-batch holds
    one dummy sequence and no rows.
    """

    token_ids: Int[Tensor, "1 t"]
    position_ids: Int[Tensor, "1 t"]
    packing: Packing
    rows: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    index: Int[Tensor, " n"]
    places: Int[Tensor, " t"]
    in_response: Bool[Tensor, " t"]
    empty: bool
    temperatures: Float[Tensor, " n"] | None = None
    kept: Int[Tensor, "n num_kept"] | None = None
    likely: Int[Tensor, "n num_likely"] | None = None
    experts: UInt8[Tensor, "t width"] | None = None


def borrowed_prompts(
    batch: SequenceBatch, chosen: Int[Tensor, " sequences"], share: bool
) -> tuple[Int[Tensor, " sequences"], Int[Tensor, " sequences"]]:
    """``(owners, shared)`` of the sequences ``chosen``.

    ``owners[i]`` is the place among ``chosen`` of the sequence that packs the prompt of sequence i:
    the first of neighbors with the same prompt, or, when prompts are not shared, i itself.
    ``shared[i]``: how many tokens sequence i borrows there (0 of itself).
    """
    here = torch.arange(len(chosen))
    if not share or batch.prompt_index is None:
        return here, torch.zeros_like(here)
    prompt_index = batch.prompt_index[chosen]
    follows = torch.nn.functional.pad(prompt_index[1:] == prompt_index[:-1], (1, 0))
    # The running maximum carries the place of a group's first sequence over the ones that follow.
    owners = torch.where(follows, 0, here).cummax(0).values
    prompts = batch.prompt_lengths[chosen]
    assert torch.equal(prompts, prompts[owners]), (
        "prompts of different lengths have the same prompt index"
    )
    return owners, torch.where(follows, prompts, 0)


def prompt_owners(
    batch: SequenceBatch, microbatches: Sequence[Sequence[int]], share: bool
) -> Int[Tensor, " sequences"]:
    """The row of ``batch`` that packs the prompt of each row; the row itself where no micro-batch
    has it."""
    owner = torch.arange(batch.num_responses)
    for rows in microbatches:
        chosen = torch.tensor(list(rows), dtype=torch.long)
        owner[chosen] = chosen[borrowed_prompts(batch, chosen, share)[0]]
    return owner


def padded_lengths(
    batch: SequenceBatch,
    rows: Sequence[int],
    rule: Multiples,
    at_least: int = 0,
    share: bool = False,
) -> Int[Tensor, " sequences"]:
    """Tokens that each of ``rows`` takes in their micro-batch, over all context ranks.

    Without rows they are those of the dummy sequence. The last one is stretched to a total that
    fits ``rule`` and is no less than ``at_least``.
    """
    if not rows:
        batch = _DUMMY
    chosen = torch.tensor(list(rows) or [0])
    _, shared = borrowed_prompts(batch, chosen, share)
    lengths = batch.lengths[chosen] - shared
    padded = (lengths + rule.sequence - 1) // rule.sequence * rule.sequence
    packed = int(padded.sum())
    total = math.ceil(max(packed, at_least) / rule.total) * rule.total
    padded[-1] += total - packed
    return padded


@dataclass(frozen=True)
class _PackedRows:
    """The rows of a micro-batch, and where each finds its prompt: see ``borrowed_prompts``."""

    batch: SequenceBatch
    chosen: Tensor
    owners: Tensor
    shared: Tensor

    @property
    def prompts(self) -> Tensor:
        return self.batch.prompt_lengths[self.chosen]

    @property
    def lengths(self) -> Tensor:
        return self.batch.lengths[self.chosen]


@dataclass(frozen=True)
class _Layout:
    """Each packed token, of all context ranks or of this one: its sequence, and its position there.

    ``starts``: where the sequences begin among the tokens of all context ranks, and the end.
    """

    sequence: Tensor
    position: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Packer:
    """Packs micro-batches for context rank ``context_rank`` of ``context``.

    ``share`` (one context rank only): neighboring sequences with the same prompt pack it once.
    """

    multiples: Multiples
    context_rank: int
    context: int
    device: torch.device
    share: bool = False
    vision: VisionBatcher | None = None  # for a vision-language model

    def __post_init__(self) -> None:
        assert not (self.share and self.context > 1), (
            "shared prompts are not cut over context ranks"
        )

    def pack(
        self, batch: SequenceBatch, rows: Sequence[int], at_least: int = 0, *, prompts: bool = False
    ) -> Microbatch:
        """The micro-batch of sequences ``rows`` of ``batch``.

        Args:
            at_least: its tokens over all context ranks, or more.
            prompts: the tokens of a prompt, but its first, are predicted too, once for neighboring
                sequences; see ``prompt_places``.

        Raises:
            ValueError: a row has no prompt, from which its first response token is predicted, no
                response, or image tokens that are not those of its images.
        """
        padded = padded_lengths(batch, rows, self.multiples, at_least, self.share)
        sequences = _sequences(batch if rows else _DUMMY, rows or [0], self.share)
        everywhere = _layout(sequences, padded)
        layout = self._own(everywhere, padded)
        packing = self._packing(sequences, layout, padded)
        if self.vision is not None:
            self._add_images(packing, sequences, padded, everywhere, layout)
        state_rows, targets, index = (torch.zeros(0, dtype=torch.long),) * 3
        if rows:
            state_rows, targets, index = _predictions(sequences, layout, prompts)
        places = _places(sequences, layout)
        # Ids of padding, and of the dummy sequence, are 0.
        token_ids = _chosen(sequences.batch.token_ids, places, 0)
        if not rows:
            places = torch.full_like(places, -1)
        experts = None
        if batch.experts is not None:
            experts = to_device(_chosen(batch.experts, places, NOT_GIVEN), self.device)
        return Microbatch(
            token_ids=to_device(token_ids[None], self.device),
            position_ids=to_device(layout.position[None], self.device),
            packing=packing,
            rows=to_device(state_rows, self.device),
            targets=to_device(targets, self.device),
            index=index,
            places=places,
            in_response=(layout.position >= sequences.prompts[layout.sequence]) & (places >= 0),
            empty=not rows,
            temperatures=self._of_responses(batch.temperatures, index, 1.0),
            kept=self._of_responses(batch.kept, index, -1),
            likely=self._of_responses(batch.likely, index, -1),
            experts=experts,
        )

    def _of_responses(
        self, values: Tensor | None, index: Tensor, of_prompts: float
    ) -> Tensor | None:
        """``values`` of the response tokens ``index``; prompt tokens, whose indices come after
        those of responses, get ``of_prompts``."""
        if values is None:
            return None
        is_prompt = index >= len(values)
        chosen = values[torch.where(is_prompt, 0, index)]
        chosen[is_prompt] = of_prompts
        return to_device(chosen, self.device)

    def _own(self, layout: _Layout, padded: Tensor) -> _Layout:
        """``layout`` of all context ranks, cut to the tokens of this rank."""
        if self.context == 1:
            return layout
        # Two chunks of each sequence: see ``attention.zigzag``.
        chunk = layout.position // (padded // (2 * self.context))[layout.sequence]
        own = (chunk == self.context_rank) | (chunk == 2 * self.context - 1 - self.context_rank)
        return _Layout(layout.sequence[own], layout.position[own], layout.starts)

    def _add_images(
        self,
        packing: Packing,
        sequences: _PackedRows,
        padded: Tensor,
        everywhere: _Layout,
        layout: _Layout,
    ) -> None:
        """Puts positions and images into ``packing``. ``everywhere``: over all context ranks."""
        assert self.vision is not None
        lengths = padded + sequences.shared
        inputs = self.vision.prepare(sequences.batch, sequences.chosen.tolist(), lengths.tolist())
        starts = lengths.cumsum(0) - lengths
        positions = inputs.positions[:, starts[everywhere.sequence] + everywhere.position]
        packing.rope_positions = to_device(positions[:, None], self.device)
        packing.images = inputs.placed(starts[layout.sequence] + layout.position, self.device)

    def _packing(self, sequences: _PackedRows, layout: _Layout, padded: Tensor) -> Packing:
        boundaries = layout.starts
        sharing: dict[str, Any] = {}
        if sequences.shared.any():
            # One run of rotary angles, chosen by position: boundaries would restart the angles of a
            # sequence that borrows its prompt at 0.
            boundaries = torch.tensor([0, len(layout.sequence)])
            positions = to_device(layout.position, self.device)
            sharing = dict(shared=sequences.shared, owner=sequences.owners, positions=positions)
        boundaries = to_device(boundaries.to(torch.int32), self.device)
        longest = int((padded + sequences.shared).max())
        return Packing(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=padded,
            **sharing,
        )


def _sequences(batch: SequenceBatch, rows: Sequence[int], share: bool) -> _PackedRows:
    chosen = torch.tensor(list(rows))
    is_short = (batch.prompt_lengths[chosen] < 1) | (batch.response_lengths[chosen] < 1)
    if is_short.any():
        raise ValueError(
            f"packing: row {int(chosen[is_short][0])} has an empty prompt or response; every"
            " sequence needs at least one token of each"
        )
    return _PackedRows(batch, chosen, *borrowed_prompts(batch, chosen, share))


def _layout(sequences: _PackedRows, padded: Tensor) -> _Layout:
    """The padded tokens of all context ranks."""
    starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(len(padded)), padded)
    # A sequence that borrows its prompt begins at the position after it.
    position = torch.arange(len(sequence)) - (starts[:-1] - sequences.shared)[sequence]
    return _Layout(sequence, position, starts)


def _places(sequences: _PackedRows, layout: _Layout) -> Tensor:
    """Indices of the packed tokens among those of the batch, -1 for padding."""
    places = sequences.batch.offsets[sequences.chosen][layout.sequence] + layout.position
    return torch.where(layout.position < sequences.lengths[layout.sequence], places, -1)


def _chosen(values: Tensor, places: Tensor, of_padding: int) -> Tensor:
    """``values`` of the tokens at ``places``."""
    chosen = values[places]
    chosen[places < 0] = of_padding
    return chosen


def _predictions(
    sequences: _PackedRows, layout: _Layout, prompts_too: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(rows, targets, index)`` of a Microbatch, in the order of the sequences.

    A packed token predicts the one after it, from the last of the prompt to the last but one of
    the response. The first token of a response whose prompt is packed elsewhere is predicted
    there: one row then predicts for several sequences.
    """
    batch = sequences.batch
    prompts = sequences.prompts
    lengths = sequences.lengths
    sequence = layout.sequence
    position = layout.position
    begins = prompts - 1
    if prompts_too:
        owners, _ = borrowed_prompts(batch, sequences.chosen, share=True)
        begins = torch.where(owners == torch.arange(len(owners)), 0, begins)
    predicts = (position >= begins[sequence]) & (position < lengths[sequence] - 1)
    rows = predicts.nonzero().squeeze(1)
    borrowers = sequences.shared.nonzero().squeeze(1)
    prompt_ends = layout.starts[:-1][sequences.owners] + sequences.shared - 1
    predicted_in = torch.cat([sequence[rows], borrowers])
    target = torch.cat([position[rows] + 1, prompts[borrowers]])
    rows = torch.cat([rows, prompt_ends[borrowers]])
    # By sequence, then by position in it: one key, for no position exceeds the longest sequence.
    order = torch.argsort(predicted_in * (int(lengths.max()) + 1) + target)
    predicted_in = predicted_in[order]
    target = target[order]
    predicted_row = sequences.chosen[predicted_in]
    targets = batch.token_ids[batch.offsets[predicted_row] + target]
    within = target - prompts[predicted_in]
    index = batch.response_offsets[predicted_row] + within
    if prompts_too:
        index = torch.where(within < 0, _prompt_starts(batch)[predicted_row] + target, index)
    return rows[order], targets, index


def prompt_places(
    batch: SequenceBatch, microbatches: Sequence[Sequence[int]]
) -> Int[Tensor, " prompt_tokens"]:
    """The index of the prediction of each prompt token of ``batch``, row after row.

    Predictions of prompts follow those of all response tokens. A prompt that neighbors in a
    micro-batch share is predicted with the first of them; its first token is not predicted.
    """
    owner = prompt_owners(batch, microbatches, share=True)
    row = torch.repeat_interleave(torch.arange(batch.num_responses), batch.prompt_lengths)
    starts = _prompt_starts(batch)
    within = torch.arange(len(row)) - (starts - starts[0])[row]
    return starts[owner[row]] + within


def _prompt_starts(batch: SequenceBatch) -> Tensor:
    """The first index of the prompt of each row."""
    lengths = batch.prompt_lengths
    return int(batch.response_lengths.sum()) + lengths.cumsum(0) - lengths
