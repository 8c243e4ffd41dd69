"""Passes over micro-batches through megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.passes import (
    EXPERTS,
    LIKELY,
    PROMPT_LOGPROBS,
    Output,
    Outputs,
    TokenLoss,
    TokenScores,
    TokenView,
)
from megatron_rl.policy.batches.microbatches import Microbatch
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.passes.head import Entropy, Head
from megatron_rl.policy.passes.logprobs import LOGPROB_CHUNK_TOKENS, TokenValues, token_values
from megatron_rl.policy.passes.routing import Routing
from megatron_rl.runtime.device import to_device
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.launch import gather_objects
from megatron_rl.types import largest

_OF_OTHER_TOKENS = (PROMPT_LOGPROBS, EXPERTS)
Consume = Callable[[Microbatch, TokenValues], tuple[Tensor, Any]]


class _SequenceSum(torch.autograd.Function):
    """All-reduce over the context ranks; of the gradient too, as every rank's loss uses the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sequence_sum(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """The differentiable sum over context-parallel ranks (the identity when there is one)."""
    if ranks.context == 1:
        return lambda values: values
    return lambda values: _SequenceSum.apply(values, ranks.context_group)


def sequence_gather(ranks: Ranks, num_places: int) -> Callable[[Tensor], Tensor]:
    """See ``passes.TokenView``. ``num_places``: columns that no rank exceeds, so that ranks need
    not tell each other how many they have."""
    if ranks.context == 1:
        return lambda columns: columns

    def gather(columns: Tensor) -> Tensor:
        padded = columns.new_full((columns.shape[0], num_places), torch.nan)
        padded[:, : columns.shape[1]] = columns.detach()
        everyone = [torch.empty_like(padded) for _ in range(ranks.context)]
        dist.all_gather(everyone, padded, group=ranks.context_group)
        return torch.cat(everyone, dim=1)

    return gather


def all_outputs(one: Outputs, other: Outputs) -> Outputs:
    """The outputs of both, each once; with gradient where one of them asks for it."""
    found: dict[str, Output] = {}
    for output in (*one, *other):
        earlier = found.get(output.name, output)
        assert earlier.value == output.value, f"one pass gives {output.name} of one setting"
        found[output.name] = replace(earlier, gradient=earlier.gradient or output.gradient)
    return tuple(found.values())


class ScoreBuffer:
    """Logprobs and outputs of all response tokens of a batch, written where they are computed: by
    tensor rank 0 of the last stage, on the context rank that holds the token. Prompt tokens stand
    behind them, at ``microbatches.prompt_places``.

    The host knows the places of the tokens, which go to the device in one copy at the end.
    """

    def __init__(
        self,
        num_tokens: int,
        outputs: Outputs,
        ranks: Ranks,
        device: torch.device,
        prompt_places: Tensor | None = None,
    ) -> None:
        self.outputs = outputs
        self._num_tokens = num_tokens
        written = [output for output in outputs if output.name not in _OF_OTHER_TOKENS]
        self._names = [output.name for output in written]
        # Rows of the buffer: one for each number of a token.
        self._widths = [1, *(int(each.value) if each.name == LIKELY else 1 for each in written)]
        self._prompt_places = prompt_places
        if prompt_places is not None:
            num_tokens += len(prompt_places)
        num_rows = sum(self._widths)
        self._values = torch.zeros(num_rows, num_tokens, dtype=torch.float32, device=device)
        self._writes = ranks.tensor_rank == 0
        self._group = ranks.replica_group
        self._places: list[Tensor] = []
        self._written: list[Tensor] = []

    def write(self, microbatch: Microbatch, values: TokenValues) -> None:
        if not self._writes:
            return
        rows = [values.logprobs, *(values.columns[name] for name in self._names)]
        self._places.append(microbatch.index)
        # [t] and [t, numbers] become [1, t] and [numbers, t].
        by_number = [values.detach().float()[:, None].flatten(1).t() for values in rows]
        self._written.append(torch.cat(by_number))

    def read(self) -> TokenScores:
        """Collective over the ranks that work on the batch; once, at the end."""
        if self._written:
            places = to_device(torch.cat(self._places), self._values.device)
            self._values[:, places] = torch.cat(self._written, dim=1)
        if self._group is not None:
            dist.all_reduce(self._values, group=self._group)
        (logprobs,), *others = self._values[:, : self._num_tokens].split(self._widths)
        columns = {
            name: values.t().contiguous() if name == LIKELY else values[0]
            for name, values in zip(self._names, others, strict=True)
        }
        if self._prompt_places is not None:
            places = to_device(self._prompt_places, self._values.device)
            columns[PROMPT_LOGPROBS] = self._values[0, places]
        return TokenScores(logprobs, columns)

    def fill(self, passes: Passes, microbatches: Sequence[Microbatch], outputs: Outputs) -> None:
        """Collective: a pass without gradient over ``microbatches``."""

        def consume(microbatch: Microbatch, values: TokenValues) -> tuple[Tensor, Any]:
            self.write(microbatch, values)
            return values.logprobs.new_zeros(()), None

        passes.run(microbatches, consume, outputs, backward=False)


@dataclass
class Totals:
    """Loss and metrics over micro-batches of this rank: sums; of keys ending in ``_max`` maxima."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, metrics: Mapping[str, float]) -> None:
        self.loss += loss
        for key, value in metrics.items():
            both = (self.metrics[key], value) if key in self.metrics else (value,)
            self.metrics[key] = largest(both) if key.endswith("_max") else sum(both)


@dataclass(frozen=True)
class Passes:
    """Runs micro-batches through the chunks of this rank. ``consume(microbatch, values)`` is called
    on the last stage only and returns (loss, what to collect)."""

    chunks: Sequence[torch.nn.Module]
    ranks: Ranks
    vocab_size: int
    temperature: float
    routing: Routing

    def run(
        self,
        microbatches: Sequence[Microbatch],
        consume: Consume,
        outputs: Outputs = (),
        *,
        backward: bool,
        counts: bool = False,
    ) -> list[Any]:
        """Collective: what ``consume`` collected for each micro-batch, in order (nothing before the
        last stage)."""
        length = 0  # without a pipeline megatron does not use it: nothing is packed to know it
        if self.ranks.pipeline > 1:
            lengths = {microbatch.token_ids.shape[1] for microbatch in microbatches}
            assert self.chunks[0].config.variable_seq_lengths or len(lengths) == 1, (
                f"pipeline stages expect micro-batches of one length: {lengths}"
            )
            length = max(lengths)
        iterators = [iter(microbatches) for _ in self.chunks]
        step = partial(self._step, consume=consume, outputs=outputs, backward=backward)
        with torch.set_grad_enabled(backward), self.routing.in_pass(counts=counts):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(microbatches),
                # megatron divides by the context ranks
                seq_length=length * self.ranks.context,
                micro_batch_size=1,
                forward_only=not backward,
            )

    def train(
        self, microbatches: Sequence[Microbatch], consume: Consume, outputs: Outputs
    ) -> list[Any]:
        """Collective: ``run`` with a backward. The losses of routers are of the whole minibatch,
        whose load a forward of its own counts."""
        load = self.routing.load
        if load is not None and load.has_losses:

            def consume_nothing(_: Microbatch, values: TokenValues) -> tuple[Tensor, Any]:
                return values.logprobs.new_zeros(()), None

            self.run(microbatches, consume_nothing, backward=False, counts=True)
            load.total()
        return self.run(microbatches, consume, outputs, backward=True, counts=True)

    def _head(self, microbatch: Microbatch, outputs: Outputs) -> Head:
        entropy: Entropy = "none"
        top_k = 0
        likely = None
        for output in outputs:
            if output.name == "entropy":
                entropy = "grad" if output.gradient else "value"
            elif output.name in ("topk_logprobs", "is_argmax"):
                # One most likely token is enough to know whether it was sampled.
                top_k = max(top_k, int(output.value), 1)
            elif output.name == LIKELY:
                likely = microbatch.likely
                assert likely is not None, "of tokens that came with the sampled ones"
            elif output.compute is None and output.name not in _OF_OTHER_TOKENS:
                raise ValueError(
                    f"output {output.name}: the policy computes no such quantity; give it a"
                    " function (Output.compute)"
                )
        given = microbatch.temperatures
        temperature = self.temperature if given is None else given
        group = self.ranks.tensor_group if self.ranks.tensor > 1 else None
        size = self.vocab_size
        kept = microbatch.kept
        return Head(temperature, size, LOGPROB_CHUNK_TOKENS, group, entropy, top_k, kept, likely)

    def _step(
        self,
        iterator: Any,
        chunk: torch.nn.Module,
        *,
        consume: Consume,
        outputs: Outputs,
        backward: bool,
    ) -> tuple[Tensor, Callable[..., Any]]:
        microbatch: Microbatch = next(iterator)
        ACTIVITY.note("a micro-batch of the policy")
        self.routing.begin(chunk, microbatch, backward=backward)
        output = chunk(
            input_ids=microbatch.token_ids,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=microbatch.packing,
            # Float16Module would convert all states to float32; only the few used ones need it.
            **({"fp32_output": False} if chunk.config.bf16 else {}),
        )
        self.routing.end(chunk, microbatch)
        return output, partial(self._finish, chunk, microbatch, consume, outputs)

    def _finish(
        self,
        chunk: torch.nn.Module,
        microbatch: Microbatch,
        consume: Consume,
        outputs: Outputs,
        output: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Last stage only: states -> logprobs of response tokens -> loss. Megatron expects (loss,
        tokens, data) and, told not to divide by the number of tokens, uses the loss as it is."""
        weight = get_attr_wrapped_model(chunk, "head_weight")()
        _wait_for(chunk, weight)
        states = output.squeeze(1).index_select(0, microbatch.rows).to(weight.dtype)
        head = self._head(microbatch, outputs)
        values = token_values(states, weight, microbatch.targets, head)
        computed = {
            each.name: each.compute(states, weight, head, each.value)
            for each in outputs
            if each.compute is not None
        }
        values = replace(values, columns={**values.columns, **computed})
        loss, data = consume(microbatch, values)
        # Without response tokens the graph must still reach every stage: the pipeline waits for a
        # gradient.
        connected = loss + values.logprobs.sum() * 0
        for column in computed.values():
            connected = connected + column.sum() * 0
        return connected, torch.zeros([], dtype=torch.int, device=loss.device), data


def _wait_for(chunk: torch.nn.Module, weight: Tensor) -> None:
    """Overlapped gathering of parameters waits in the forward of the module that owns a parameter;
    the output layer's forward is never called, so its weight is waited for here."""
    ddp = getattr(chunk, "ddp_config", None)
    if ddp is not None and ddp.overlap_param_gather and weight in chunk.param_to_bucket_group:
        chunk.param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)


def _finalize(chunks: Any, num_tokens: Any = None, **more: Any) -> None:
    """megatron's reduction of gradients, without its division by a number of tokens: a loss is a
    contribution, and the gradient is the plain sum over micro-batches and data x context ranks."""
    finalize_model_grads(chunks, None, **more)


def set_hooks(config: TransformerConfig, chunks: Sequence[Any], parallel: ParallelConfig) -> None:
    """Tells megatron's schedules how gradients are finished, and how their reduction is held back
    but for the last micro-batch."""
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = None
    if parallel.overlap_grad_reduce:
        each: list[Any] = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = each if len(each) > 1 else each[0]


def finish_param_gather(chunks: Sequence[Any]) -> None:
    """Collective: gathers what an overlapped gathering has not gathered yet, and waits for it. A
    forced synchronization of a whole chunk would gather again what is there."""
    for chunk in chunks:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def loss_consumer(
    loss: TokenLoss, outputs: Outputs, ranks: Ranks, buffer: ScoreBuffer | None
) -> Consume:
    """``consume`` for an update: the contribution of a micro-batch, and what it adds to the totals.
    ``outputs``: those that the loss gets."""
    over_context = sequence_sum(ranks)

    def consume(microbatch: Microbatch, values: TokenValues) -> tuple[Tensor, Any]:
        if microbatch.empty:
            return values.logprobs.new_zeros(()), None
        if buffer is not None:
            buffer.write(microbatch, values)
        view = TokenView(
            microbatch.index,
            values.logprobs,
            {output.name: values.columns[output.name] for output in outputs},
            sequence_sum=over_context,
            # A context rank has at most one response token for each token it works on.
            sequence_gather=sequence_gather(ranks, microbatch.token_ids.shape[1]),
        )
        result = loss(view)
        assert result.loss.ndim == 0, f"a loss is a scalar, not {tuple(result.loss.shape)}"
        # The schedule may change the loss in place.
        return result.loss, (
            result.loss.detach().clone(),
            {key: value.detach() for key, value in result.metrics.items()},
        )

    return consume


def _numbers(
    contributions: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
) -> list[tuple[float, dict[str, float]]]:
    """Losses and metrics of micro-batches as numbers, read from the device once (float64 holds what
    every smaller format holds)."""
    tensors = [each for loss, metrics in contributions for each in (loss, *metrics.values())]
    if not tensors:
        return []
    scalars = [tensor.to(tensors[0].device, torch.float64).reshape(()) for tensor in tensors]
    values = iter(torch.stack(scalars).tolist())
    # Taken out in the order in which they went in above.
    return [(next(values), {key: next(values) for key in metrics}) for _, metrics in contributions]


def reduce_totals(collected: Sequence[Any], ranks: Ranks) -> Totals:
    """Collective over the world: totals over micro-batches and data x context ranks, equal
    everywhere. Every tensor rank of the last stage holds the same values; one of them counts."""
    local = Totals()
    if ranks.pipeline_rank == ranks.pipeline - 1 and ranks.tensor_rank == 0:
        for loss, metrics in _numbers([data for data in collected if data is not None]):
            local.add(loss, metrics)
    total = Totals()
    for other in gather_objects(local):
        total.add(other.loss, other.metrics)
    return total
