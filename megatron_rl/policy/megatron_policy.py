"""The policy: a HF model trained by megatron-core."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from megatron_rl.config.schema import ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from megatron_rl.policy import checkpoint, convert, cpu, weights
from megatron_rl.policy import optimizer as optim_room
from megatron_rl.policy import parallel as groups
from megatron_rl.policy.families import read_architecture
from megatron_rl.policy.forward import Passes, ScoreBoard, Totals, loss_consumer, reduce_totals
from megatron_rl.policy.gather import Gather
from megatron_rl.policy.held_boxes import held_boxes, key
from megatron_rl.policy.layout import padded_vocab
from megatron_rl.policy.machine import this_machine
from megatron_rl.policy.model import build_chunks, transformer_config
from megatron_rl.policy.not_finite import check_weights
from megatron_rl.policy.offload import Offload, dispatcher_tensors, release_caches
from megatron_rl.policy.packing import Microbatch, multiples, pack, padded_lengths
from megatron_rl.policy.precision import ddp_config, describe, logprob_format, plain, token_multiple
from megatron_rl.policy.reference import Reference
from megatron_rl.protocols import Entropy
from megatron_rl.runtime.cpu import device, platform
from megatron_rl.types import Box, SequenceBatch, TokenLoss, TokenScores, UpdateResult

log = logging.getLogger(__name__)


def _finalize(chunks: Any, num_tokens: Any = None, **more: Any) -> None:
    """megatron's reduction of gradients, without its division by a number of tokens: a loss is a contribution, and the gradient
    is the plain sum over micro-batches and data x context ranks."""
    finalize_model_grads(chunks, None, **more)


class MegatronPolicy:
    """Implements ``protocols.Policy``. torch.distributed must be initialised; construction is collective.

    ``temperature`` divides the logits in every pass. ``keep_reference`` keeps the starting weights of this rank's shard for
    reference passes. ``require_finite``: refuse weights of NaN or infinity. Raises ValueError when the model directory or the layout
    does not fit (every problem of the layout).
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        optim: OptimConfig,
        *,
        temperature: float,
        keep_reference: bool,
        total_optimizer_steps: int,
        max_sequence_tokens: int,
        require_finite: bool = True,
    ) -> None:
        self.path = Path(model.path)
        self.arch, self.hf_config = read_architecture(self.path)
        problems = groups.layout_problems(self.arch, parallel, dist.get_world_size())
        if problems:
            raise ValueError("\n".join(problems))
        weights.Checkpoint(self.path).check(self.arch)  # headers only: a damaged folder is named before anything is built
        cpu.apply()
        self.ranks = groups.initialize(parallel)
        self.parallel, self.optim, self.precision = parallel, optim, precision
        self.total_optimizer_steps = total_optimizer_steps
        self.optimizer_steps = 0
        self.device = device()
        self.vocab_rows = padded_vocab(self.arch.vocab_size, model.make_vocab_divisible_by, parallel.tensor)
        self._multiples = multiples(parallel.context, parallel.tensor, parallel.sequence, token_multiple(precision))
        with platform():
            self.config = transformer_config(self.arch, parallel, precision)
            self.modules = build_chunks(self.config, self.arch, self.hf_config, model.make_vocab_divisible_by, max_sequence_tokens)
            self.held = weights.held_parameters(self.modules, self.arch, self.ranks, self.vocab_rows)
            weights.load(self.held, self.arch, self.path, require_finite=require_finite)
            self.chunks = [
                DistributedDataParallel(self.config, ddp_config(parallel, precision), module, disable_bucketing=index > 0)
                for index, module in enumerate(self.modules)
            ]
            self._set_hooks()
            self.optimizer = optim_room.build_optimizer(optim, parallel, precision, self.chunks)
        parts = {"weights": self._weight_tensors, "gradients": self._gradient_tensors, "optimizer": self._optimizer_tensors}
        self._offload = Offload(parts, ("gradients",), self.device)
        self._dispatchers = dispatcher_tensors(self.modules)
        if dist.get_rank() == 0:
            sharing = "once for all its responses" if self.shares_prompts else "for every response (context parallel or Transformer Engine)"
            log.info("policy: %s; a prompt is computed %s", describe(precision, this_machine()), sharing)
        self.reference = Reference(self.held, self.chunks, staged=self.device.type == "cuda") if keep_reference else None
        self._by_key = {key(item): item.tensor for item in self.held}
        self._gather = Gather(self.held, self.arch, self.ranks, self.vocab_rows)
        self._passes = Passes(self.chunks, self.ranks, self.arch.vocab_size, temperature)

    def _set_hooks(self) -> None:
        self.config.finalize_model_grads_func = _finalize
        self.config.grad_scale_func = None
        if self.parallel.overlap_grad_reduce:
            each: list[Any] = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = each if len(each) > 1 else each[0]

    @property
    def data_parallel_rank(self) -> int:
        return self.ranks.data_rank

    @property
    def data_parallel_size(self) -> int:
        return self.ranks.data

    @property
    def shares_prompts(self) -> bool:
        """Transformer Engine's attention and context parallelism want every sequence whole."""
        return self.ranks.context == 1 and this_machine().transformer_engine is None

    @property
    def microbatch_multiple(self) -> int:
        """Interleaved pipelines take micro-batches in groups of one a stage."""
        return self.ranks.pipeline if self.parallel.virtual_pipeline is not None else 1

    @property
    def one_format(self) -> bool:
        return self.precision.fp8 is None or self.precision.fp8.logprobs == "same"

    def logprobs(
        self,
        batch: SequenceBatch,
        microbatches: Sequence[Sequence[int]],
        *,
        reference: bool = False,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        """See protocols.Policy."""
        self._offload.require("weights")
        board = ScoreBoard(int(batch.response_lengths.sum()), entropy, self.ranks, self.device)

        def consume(microbatch: Microbatch, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Any]:
            board.write(microbatch, logprobs, entropies)
            return logprobs.new_zeros(()), None

        passes = self._passes if temperature is None else Passes(self.chunks, self.ranks, self.arch.vocab_size, temperature)
        with self._weights(reference), logprob_format(self.config, self.precision), platform():
            passes.run(self._pack(batch, microbatches), consume, backward=False, entropy="value" if entropy else "none")
        return board.everywhere()

    def update(
        self,
        batch: SequenceBatch,
        microbatches: Sequence[Sequence[int]],
        loss: TokenLoss,
        *,
        entropy: Entropy = "none",
        scores: bool = False,
    ) -> UpdateResult:
        """See protocols.Policy."""
        board = ScoreBoard(int(batch.response_lengths.sum()), entropy != "none", self.ranks, self.device) if scores else None
        totals = self.backward(batch, microbatches, loss, entropy=entropy, board=board)
        rate = optim_room.learning_rate(self.optimizer_steps, self.optim, self.total_optimizer_steps)
        with platform():
            norm, skipped = optim_room.step(self.optimizer, self.optim, rate, totals.loss)
        self.optimizer_steps += 1
        own = None if board is None else board.everywhere()
        return UpdateResult(totals.loss, norm, learning_rate=rate, skipped=skipped, metrics=totals.metrics, scores=own)

    def backward(
        self,
        batch: SequenceBatch,
        microbatches: Sequence[Sequence[int]],
        loss: TokenLoss,
        *,
        entropy: Entropy = "none",
        board: ScoreBoard | None = None,
    ) -> Totals:
        """Collective: loss and metrics of the minibatch; leaves its gradient in the parameters, and the scores of its tokens on the
        board. The first half of an update. A reference pass in between may take the gradient's memory."""
        self._offload.require("weights", "gradients", "optimizer")
        with platform():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            consume = loss_consumer(loss, self.ranks, entropy=entropy == "grad", board=board)
            collected = self._passes.run(self._pack(batch, microbatches), consume, backward=True, entropy=entropy)
        return reduce_totals(collected, self.ranks)

    def _pack(self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]]) -> list[Microbatch]:
        assert len(microbatches) % self.microbatch_multiple == 0, (
            f"{len(microbatches)} micro-batches do not form groups of {self.microbatch_multiple}"
        )
        totals = [0] * len(microbatches)
        if self.config.num_moe_experts and self.config.moe_token_dispatcher_type == "allgather":
            totals = self._equal_totals(batch, microbatches)
        ranks, rule = self.ranks, self._multiples
        return [
            pack(batch, rows, rule, ranks.context_rank, ranks.context, self.device, at_least=total, share=self.shares_prompts)
            for rows, total in zip(microbatches, totals, strict=True)
        ]

    def _equal_totals(self, batch: SequenceBatch, microbatches: Sequence[Sequence[int]]) -> list[int]:
        """Collective: the longest packed length of each micro-batch over all ranks (this dispatcher gathers equal sizes)."""
        lengths = [padded_lengths(batch, rows, self._multiples, share=self.shares_prompts) for rows in microbatches]
        totals = torch.tensor([int(each.sum()) for each in lengths], device=self.device)
        dist.all_reduce(totals, op=dist.ReduceOp.MAX)
        return totals.tolist()

    @property
    def gathered_bytes_sent(self) -> int:
        """See protocols.Policy. Every rank that needs a shard counts once, whatever way the collectives take."""
        return self._gather.bytes_sent

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See protocols.Policy."""
        self.settle()
        yield from self._gather.run(plain)

    def gathered_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: the gradients left by ``backward``, by HF name, whole on every rank."""
        with platform():
            optim_room.whole_gradients(self.chunks)
        yield from self._gather.run(lambda parameter: parameter.main_grad)

    def gradient_norm(self) -> float:
        """Collective: of the gradient left by ``backward``, over all parameters, as the optimizer step has it."""
        with platform():
            return optim_room.gradient_norm(self.optimizer)

    def weight_boxes(self) -> list[Box]:
        """The parts of HF tensors that this rank holds, for a planned weight sync; the keys are those of ``weight``."""
        return held_boxes(self.held, self.arch)

    def weight(self, name: str) -> Tensor:
        """This rank's parameter of that key, as it is now (after ``settle``). Raises KeyError."""
        return plain(self._by_key[name])

    def settle(self) -> None:
        """Collective: finishes an overlapped gathering of parameters. Called before the weights are read, which must not be away."""
        self._offload.require("weights")
        if self.parallel.overlap_param_gather:
            with platform():
                for chunk in self.chunks:
                    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                        # Gathers what the update has not gathered yet, and waits. A forced synchronization of the whole chunk would
                        # gather again what is there.
                        group.finish_param_sync(skip_next_bucket_dispatch=True)

    def check_weights(self, step: int) -> None:
        """See protocols.Policy."""
        self.settle()
        done = self.optimizer_steps - 1
        rate = None if done < 0 else optim_room.learning_rate(done, self.optim, self.total_optimizer_steps)
        named = [(item.parameter.names, item.tensor) for item in self.held]
        check_weights(named, self.device, step, rate)

    @contextlib.contextmanager
    def _weights(self, reference: bool) -> Iterator[None]:
        """The reference weights in place of the trained ones, for the duration of a reference pass."""
        if not reference:
            yield
            return
        assert self.reference is not None, "reference passes need keep_reference=True"
        self._offload.require("weights", "gradients")  # whose memory the pass may use
        self.settle()
        with self.reference.lent():
            yield

    def offload(self, parts: Sequence[str]) -> None:
        """See protocols.Policy."""
        if "weights" not in self._offload.away:
            self.settle()
        if "gradients" in parts:
            self.optimizer.zero_grad()  # copies of gradients, and views into their buffers
        if parts:
            release_caches(self.modules, self._dispatchers)
        self._offload.offload(parts)

    def reload(self) -> None:
        """See protocols.Policy."""
        self._offload.reload()

    def _weight_tensors(self) -> Iterable[Tensor]:
        return (parameter.data for module in self.modules for parameter in module.parameters())

    def _gradient_tensors(self) -> Iterable[Tensor]:
        return (parameter.main_grad for module in self.modules for parameter in module.parameters())

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        for part in optim_room.parts(self.optimizer):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.data
                    yield from (value for value in part.optimizer.state.get(parameter, {}).values() if torch.is_tensor(value))

    def save(self, path: Path, extra: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
        self._offload.require("weights", "gradients", "optimizer")
        self.settle()
        with platform():
            checkpoint.save(self, path, extra, about)

    def load(self, path: Path) -> Mapping[str, Any]:
        self._offload.require("weights", "gradients", "optimizer")
        with platform():
            return checkpoint.load(self, path)

    def export(self, path: Path) -> None:
        self._offload.require("weights")
        convert.export_hf(self, path)

    def close(self) -> None:
        """Collective: forgets megatron's process groups (a process may then build another policy)."""
        groups.destroy()


__all__ = ["MegatronPolicy"]
