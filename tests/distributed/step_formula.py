"""Messages of one step, by hand: how often and how many bytes a rank gives to every collective,
from sizes alone.

For layers of megatron-core and torch with sequence parallelism, experts that are not cut, and a
balanced router. Bytes are those of the input of a call on this rank; of a received tensor its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models import Architecture
from tests.distributed.fake_world import Kind

# Bytes of a number: weights and activations; gradients and what the loss needs; counts and shapes.
HALF, FLOAT, LONG = ("bfloat16", 2), ("float32", 4), ("int64", 8)


@dataclass(frozen=True)
class Work:
    """``microbatches`` of one sequence each, ``length`` tokens of which ``prompt`` are its
    prompt."""

    microbatches: int
    length: int
    prompt: int

    @property
    def response_tokens(self) -> int:
        return self.microbatches * (self.length - self.prompt)


@dataclass(frozen=True)
class Place:
    """A rank: its pipeline stage and its context rank decide what it sends. ``stage_layers``:
    layers of each chunk it holds."""

    stage: int
    context_rank: int
    chunk_layers: tuple[int, ...]


@dataclass
class Messages:
    """Calls and bytes by kind. Nothing is sent inside a group of one, but for the sums over
    data-parallel ranks, which megatron asks for all the same."""

    calls: Counter[Kind] = field(default_factory=Counter)
    bytes: Counter[Kind] = field(default_factory=Counter)

    def add(
        self, name: str, group: str, ranks: int, numbers: tuple[str, int], calls: int, each: int
    ) -> None:
        """``calls`` times ``each`` numbers."""
        if calls:
            kind = Kind(name, group, ranks, numbers[0])
            self.calls[kind] += calls
            self.bytes[kind] += calls * each * numbers[1]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Step:
    """The formula for one rank. ``world``: number of ranks; ``divisible_by``: of the padded
    vocabulary."""

    def __init__(
        self,
        arch: Architecture,
        parallel: ParallelConfig,
        world: int,
        place: Place,
        work: Work,
        divisible_by: int,
    ) -> None:
        self.arch = arch
        self.parallel = parallel
        self.world = world
        self.place = place
        self.work = work
        self.first = place.stage == 0
        self.last = place.stage == parallel.pipeline - 1
        self.layers = sum(place.chunk_layers)
        # Of a micro-batch on this rank, before the tensor ranks divide them.
        self.tokens = work.length // parallel.context
        self.share = self.tokens // parallel.tensor
        self.vocab_rows = up(arch.vocab_size, divisible_by * parallel.tensor) // parallel.tensor
        # Context ranks hold equal weights, too.
        self.data = world // (parallel.tensor * parallel.pipeline)
        self.expert_data = world // (parallel.expert * parallel.pipeline)

    def logprobs(self) -> Messages:
        """The first pass after an update, without gradient: the forward, and the values of the rows
        of a data-parallel rank summed over the ranks that work on them. With overlap it gathers the
        weights that the update left."""
        found = Messages()
        self._forward(found)
        if self.parallel.overlap_param_gather:
            self._data_parallel(found, gradients=False, weights=True)
        # The ranks that work on the same rows: world / data ranks, context ranks among them.
        replica = self.parallel.tensor * self.parallel.pipeline * self.parallel.context
        calls = int(replica > 1)
        found.add("all_reduce", "replica", replica, FLOAT, calls, self.work.response_tokens)
        return found

    def update(self) -> Messages:
        """Forward, backward, the optimizer's step, and the totals of loss and metrics."""
        found = Messages()
        self._forward(found)
        self._backward(found)
        self._whole_parameters(found)
        self._data_parallel(found, gradients=True, weights=not self.parallel.overlap_param_gather)
        found.add("all_reduce", "optimizer", self.world, FLOAT, 1, 1)  # the norm of the gradient
        # How many tokens each expert of each layer got.
        experts = (self.arch.num_layers - self.arch.num_dense_layers) * self.arch.num_experts
        found.add("all_reduce", "world", self.world, ("float64", 8), int(experts > 0), experts)
        # The totals, as objects: their length, then themselves.
        found.add("all_gather", "world", self.world, LONG, 1, 1)
        found.add("all_gather", "world", self.world, ("uint8", 1), 1, 0)
        return found

    def _forward(self, found: Messages) -> None:
        tensor, hidden, each = self.parallel.tensor, self.arch.hidden_size, self.work.microbatches
        # A layer gathers the tokens before its matrices cut by rows and scatters the sums behind
        # those cut by columns: attention, and the feed-forward unless it has experts. The
        # embedding's sums are scattered; the last states are gathered for the head.
        blocks = self.layers * (1 if self.arch.num_experts else 2)
        found.add(
            "all_gather", "tensor", tensor, HALF, each * (blocks + self.last), self.share * hidden
        )
        found.add(
            "reduce_scatter",
            "tensor",
            tensor,
            HALF,
            each * (blocks + self.first),
            self.tokens * hidden,
        )
        if self.last:
            rows = self._rows()
            # largest logit, sum of exponentials, the target's logit
            found.add("all_gather", "tensor", tensor, FLOAT, each if rows else 0, 3 * rows)
        self._context(found, "all_gather", 1)
        if self.arch.num_experts:
            found.add(
                "all_gather",
                "experts",
                self.parallel.expert,
                LONG,
                each * self.layers,
                self.arch.num_experts,
            )
            self._experts(found)
        self._pipeline(found, received=not self.first, sent=not self.last)

    def _backward(self, found: Messages) -> None:
        tensor, hidden, each = self.parallel.tensor, self.arch.hidden_size, self.work.microbatches
        blocks = self.layers * (1 if self.arch.num_experts else 2)
        # The gradient behind a matrix cut by columns is gathered; the input of one cut by rows is
        # gathered again for its weights, and the gradient of that input scattered. Gathering the
        # last states has no message in its backward, the embedding's scattering has.
        found.add(
            "all_gather",
            "tensor",
            tensor,
            HALF,
            each * (2 * blocks + self.first),
            self.share * hidden,
        )
        found.add("reduce_scatter", "tensor", tensor, HALF, each * blocks, self.tokens * hidden)
        if self.last:
            found.add(
                "all_reduce",
                "tensor",
                tensor,
                FLOAT,
                each if self._rows() else 0,
                self._rows() * hidden,
            )
        self._context(found, "reduce_scatter", self.parallel.context)
        if self.arch.num_experts:
            self._experts(found)
        self._pipeline(found, received=not self.last, sent=not self.first)

    def _context(self, found: Messages, name: str, times: int) -> None:
        """Keys and values of all context ranks in every layer, and their gradients back."""
        ranks, arch = self.parallel.context, self.arch
        if ranks > 1:
            heads = arch.num_kv_heads // self.parallel.tensor
            numbers = times * self.tokens * 2 * heads * arch.head_dim
            found.add(name, "context", ranks, HALF, self.work.microbatches * self.layers, numbers)

    def _experts(self, found: Messages) -> None:
        """Every token to its experts, with its weights, and back; the backward is the same, the
        other way round."""
        calls, rows = self.work.microbatches * self.layers, self.share * self.arch.experts_per_token
        found.add(
            "all_to_all",
            "expert",
            self.parallel.expert,
            HALF,
            2 * calls,
            rows * self.arch.hidden_size,
        )
        found.add("all_to_all", "expert", self.parallel.expert, FLOAT, calls, rows)

    def _pipeline(self, found: Messages, *, received: bool, sent: bool) -> None:
        """A micro-batch passes every chunk of every stage, and its shape goes before it.
        ``received`` and ``sent``: whether this stage does so for its outermost chunk as well."""
        if self.parallel.pipeline == 1:
            return
        inner = len(self.place.chunk_layers) - 1
        for name, outermost in (("recv", received), ("send", sent)):
            calls = self.work.microbatches * (inner + outermost)
            found.add(name, "pipeline", 2, HALF, calls, self.share * self.arch.hidden_size)
            found.add(name, "pipeline", 2, LONG, calls, 3)

    def _rows(self) -> int:
        """States on this context rank that predict a response token of one sequence: those from the
        last of the prompt on, without the last of all. A context rank has two of 2 * ranks chunks,
        one from each end."""
        parts = 2 * self.parallel.context
        size = self.work.length // parts
        mine = (self.place.context_rank, parts - 1 - self.place.context_rank)
        chunks = mine if self.parallel.context > 1 else (0, 1)
        return sum(
            max(
                0,
                min((chunk + 1) * size, self.work.length - 1)
                - max(chunk * size, self.work.prompt - 1),
            )
            for chunk in chunks
        )

    def _whole_parameters(self, found: Messages) -> None:
        """Gradients of parameters that every tensor rank holds whole, of its share of the tokens:
        one sum for all."""
        arch = self.arch
        layer = (
            2 * arch.hidden_size
            + (2 * arch.head_dim if arch.qk_norm else 0)
            + arch.num_experts * arch.hidden_size
        )
        found.add(
            "all_reduce",
            "tensor",
            self.parallel.tensor,
            FLOAT,
            1,
            self.layers * layer + (arch.hidden_size if self.last else 0),
        )

    def _data_parallel(self, found: Messages, *, gradients: bool, weights: bool) -> None:
        """Gradients summed and dealt out, new weights gathered: once for each chunk and each kind
        of parameter."""
        last_chunk = len(self.place.chunk_layers) - 1
        for chunk, layers in enumerate(self.place.chunk_layers):
            buffers = [
                (
                    "data and context",
                    self.data,
                    self.buffer(
                        layers, self.first and chunk == 0, self.last and chunk == last_chunk
                    ),
                )
            ]
            if self.arch.num_experts:
                buffers.append(("expert data", self.expert_data, self.expert_buffer(layers)))
            for group, ranks, numbers in buffers:
                found.add("reduce_scatter", group, ranks, FLOAT, int(gradients), numbers)
                found.add("all_gather", group, ranks, HALF, int(weights), numbers // ranks)

    def buffer(self, layers: int, embedding: bool, head: bool) -> int:
        """Numbers of a chunk's parameters outside experts, each begun at a multiple of 64, all
        filled up to a multiple of 128 that every data-parallel rank has an equal share of."""
        vocabulary = self.vocab_rows * self.arch.hidden_size
        sizes = self.layer_sizes() * layers
        sizes += [vocabulary] if embedding else []
        sizes += [vocabulary, self.arch.hidden_size] if head else []
        return up(sum(up(size, 64) for size in sizes), math.lcm(128, self.data))

    def expert_buffer(self, layers: int) -> int:
        sizes = self.expert_sizes() * layers
        return up(sum(up(size, 64) for size in sizes), math.lcm(128, self.expert_data))

    def layer_sizes(self) -> list[int]:
        """Numbers of each parameter of a layer outside experts, on a tensor rank."""
        arch = self.arch
        tensor = self.parallel.tensor
        rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim // tensor
        columns = arch.num_heads * arch.head_dim // tensor
        sizes = [rows * arch.hidden_size, columns * arch.hidden_size]
        sizes += [arch.hidden_size, arch.hidden_size]
        sizes += [rows] if arch.qkv_bias else []
        sizes += [arch.head_dim, arch.head_dim] if arch.qk_norm else []
        if arch.num_experts:
            return [*sizes, arch.num_experts * arch.hidden_size]
        ffn = arch.ffn_hidden_size // tensor
        return [*sizes, 2 * ffn * arch.hidden_size, ffn * arch.hidden_size]

    def expert_sizes(self) -> list[int]:
        """The same of the experts of a layer that a rank has."""
        one = self.arch.expert_ffn_hidden_size * self.arch.hidden_size
        return [2 * one, one] * (self.arch.num_experts // self.parallel.expert)

    def gathering(self) -> Messages:
        """Whole weights on every rank: unit after unit (embedding, layers, experts of layers, the
        end) its shards are gathered on its stage, and sent from there to the other stages."""
        found = Messages()
        tensor = self.parallel.tensor
        vocabulary = self.vocab_rows * self.arch.hidden_size
        layer = sum(self.layer_sizes())
        end = vocabulary + self.arch.hidden_size
        self._unit(found, "tensor", tensor, vocabulary, int(self.first), 1)
        self._unit(found, "tensor", tensor, layer, self.layers, self.arch.num_layers)
        self._unit(found, "tensor", tensor, end, int(self.last), 1)
        if self.arch.num_experts:
            size, ranks = sum(self.expert_sizes()), self.parallel.expert
            self._unit(found, "experts", ranks, size, self.layers, self.arch.num_layers)
        return found

    def _unit(
        self, found: Messages, group: str, ranks: int, size: int, here: int, everywhere: int
    ) -> None:
        """``here`` units of this stage, ``everywhere`` of all stages; ``size`` numbers on a
        rank."""
        found.add("all_gather", group, ranks, HALF, here, size)
        stages = self.parallel.pipeline
        found.add("broadcast", "pipeline", stages, HALF, everywhere * (stages > 1), ranks * size)


def differences(
    expected: Messages, found_calls: Counter[Kind], found_bytes: Counter[Kind]
) -> Iterator[str]:
    """What was sent otherwise than the formula says, one line for each kind. Objects are compared
    by their number."""
    for kind in sorted({*expected.calls, *found_calls}, key=str):
        want, got = (
            (expected.calls[kind], expected.bytes[kind]),
            (found_calls[kind], found_bytes[kind]),
        )
        if kind.dtype == "uint8":
            want, got = want[:1], got[:1]
        if want != got:
            yield f"{kind}: the formula says (calls, bytes) {want}, it was {got}"
