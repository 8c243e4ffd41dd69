"""The policy: a HF model trained by megatron-core."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from megatron_rl.checkpoints import peft_format
from megatron_rl.checkpoints.part_writer import Memory
from megatron_rl.checkpoints.saving import CheckpointSave
from megatron_rl.config.rules.layout_rules import layout_problems
from megatron_rl.config.rules.teacher_rules import teachers
from megatron_rl.config.schema import ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from megatron_rl.models import read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.experts import router_problems
from megatron_rl.models.parameter_map import padded_vocab
from megatron_rl.models.problems import adapter_problems, family_problems
from megatron_rl.passes import (
    EXPERTS,
    PROMPT_LOGPROBS,
    LocalBatch,
    Outputs,
    TokenLoss,
    TokenScores,
    UpdateResult,
)
from megatron_rl.policy import optimizer, patches
from megatron_rl.policy import parallel as groups
from megatron_rl.policy.adapters import start_adapters, switched_off
from megatron_rl.policy.batches.batching import Batching
from megatron_rl.policy.batches.microbatches import Packer, multiples, prompt_places
from megatron_rl.policy.batches.packing_plan import PlanRule
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.model import build_chunks, transformer_config
from megatron_rl.policy.not_finite import check_weights
from megatron_rl.policy.passes.forward import (
    Passes,
    ScoreBuffer,
    Totals,
    all_outputs,
    finish_param_gather,
    loss_consumer,
    reduce_totals,
    set_hooks,
)
from megatron_rl.policy.passes.routing import ExpertRecord, Routing, prompt_sources
from megatron_rl.policy.passes.vision import VisionBatcher
from megatron_rl.policy.precision import (
    ddp_config,
    describe,
    logprob_format,
    optimizer_config,
    token_multiple,
)
from megatron_rl.policy.reference import Reference
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.policy.state import checkpoint, checkpoint_loading, export, weights
from megatron_rl.policy.state.offload import (
    Offload,
    dispatcher_tensors,
    release_caches,
    training_tensors,
)
from megatron_rl.policy.state.weight_view import WeightView
from megatron_rl.policy.teacher import FrozenTeacher
from megatron_rl.runtime.device import device, platform
from megatron_rl.types import SequenceBatch, Shard

Values = Mapping[str, Any]
After = Callable[[], None] | None
logger = logging.getLogger(__name__)


class MegatronPolicy:
    """Implements ``Policy``, ``Offloadable`` and the weight sources of ``protocols``.

    torch.distributed must be initialized; construction is collective.

    Raises:
        ValueError: the model directory or the layout does not fit (every problem of the layout).
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        optim: OptimConfig,
        settings: PolicySettings,
    ) -> None:
        self.path = Path(model.path)
        self.model = model
        self.arch, self.hf_config = read_architecture(self.path)
        problems = layout_problems(self.arch, parallel, dist.get_world_size())
        problems += family_problems(self.arch, model, parallel, precision)
        problems += adapter_problems(self.arch, model, parallel, precision)
        problems += router_problems(self.arch, model, optim, settings.keep_reference)
        if problems:
            raise ValueError("\n".join(problems))
        self.arch = with_adapters(self.arch, model.lora)
        weights.check_directory(self.path, self.arch)
        patches.apply()
        self.ranks = groups.initialize(parallel)
        self.parallel = parallel
        self.optim = optim
        self.precision = precision
        self.settings = settings
        self.optimizer_steps = 0
        self.checkpoint_memory = Memory()
        self.device = device()
        divisible_by = model.make_vocab_divisible_by
        self.vocab_rows = padded_vocab(self.arch.vocab_size, divisible_by, parallel.tensor)
        with platform():
            self._build_model(model)
            adam = optimizer_config(optim, parallel, precision)
            self.optimizer = get_megatron_optimizer(adam, self.chunks)
        self.training_tensors = training_tensors(self.modules, self.optimizer)
        self._offload = Offload(self.training_tensors, ("gradients",), self.device)
        self._dispatchers = dispatcher_tensors(self.modules)
        self.reference: Reference | None = None
        # With adapters the reference is the model without them.
        if settings.keep_reference and not self.arch.adapter_slots:
            self.reference = Reference(self.held, self.chunks)
        self.base_digest = self.view.base_digest()
        self._routing = Routing(self.chunks, self.arch, self.ranks, optim)
        size = self.arch.vocab_size
        self._passes = Passes(self.chunks, self.ranks, size, settings.temperature, self._routing)
        self.batching = self._build_batching()
        self.teachers = [FrozenTeacher(folder, self) for folder in teachers(model)]
        self._log_choices()

    def _build_model(self, model: ModelConfig) -> None:
        self.config = transformer_config(self.arch, self.parallel, self.precision)
        max_tokens = self.settings.max_sequence_tokens
        self.modules = build_chunks(self.config, self.arch, self.hf_config, model, max_tokens)
        self.held = weights.local_parameters(self.modules, self.arch, self.ranks, self.vocab_rows)
        self.view = WeightView(self.held, self.modules, self.arch, self.ranks, self.vocab_rows)
        # A checkpoint of adapters has no weights.
        if self.settings.read_weights or self.view.adapters:
            finite = self.settings.require_finite
            weights.load(self.view.served, self.arch, self.path, self.ranks, require_finite=finite)
        if self.view.adapters:
            start_adapters(self.view.saved, self.arch, model.lora, read=self.settings.read_weights)
        self.chunks = [
            DistributedDataParallel(
                self.config,
                ddp_config(self.parallel, self.precision),
                module,
                disable_bucketing=index > 0,
            )
            for index, module in enumerate(self.modules)
        ]
        set_hooks(self.config, self.chunks, self.parallel)

    def _build_batching(self) -> Batching:
        parallel = self.parallel
        vision = None
        if self.arch.vision is not None:
            has_tower = self.ranks.pipeline_rank == 0
            vision = VisionBatcher(self.arch.vision, self.settings.image_processor, has_tower)
        # Transformer Engine's, context-parallel and linear attention need every sequence whole.
        can_share = self.ranks.context == 1 and this_machine().transformer_engine is None
        can_share = can_share and self.arch.linear is None
        rank_tokens = token_multiple(self.precision)
        packer = Packer(
            multiples(parallel.context, parallel.tensor, parallel.sequence, rank_tokens),
            self.ranks.context_rank,
            self.ranks.context,
            self.device,
            share=can_share and self.settings.share_prompts,
            vision=vision,
        )
        rule = PlanRule(
            self.ranks.data,
            self.settings.tokens_per_microbatch,
            # Interleaved pipelines take micro-batches in groups of one a stage.
            multiple=self.ranks.pipeline if parallel.virtual_pipeline is not None else 1,
            work=WorkModel.of(self.arch),
        )
        return Batching(self.config, self.ranks, rule, packer)

    def _log_choices(self) -> None:
        if dist.get_rank() != 0:
            return
        sharing = "for every response (batch.share_prompts, layout, layers or Transformer Engine)"
        if self.batching.packer.share:
            sharing = "once for all its responses"
        numbers = describe(self.precision, this_machine())
        logger.info("policy: %s; a prompt is computed %s", numbers, sharing)

    def score_alone(
        self, batch: SequenceBatch, *, reference: bool = False, temperature: float | None = None
    ) -> TokenScores:
        """Collective: ``score`` of a batch that every data-parallel rank has and scores whole, the
        same everywhere: for few and short sequences."""
        alone = LocalBatch(batch, self.batching.alone(batch))
        return self.score(alone, reference=reference, temperature=temperature)

    def score(
        self,
        batch: LocalBatch,
        outputs: Outputs = (),
        *,
        reference: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        """See protocols.Policy. Sequences that no micro-batch names score 0; a micro-batch may be
        empty. ``temperature``: instead of that of the settings. A reference chooses its experts by
        its own weights: with those of another it would be a third model."""
        self._offload.require("weights")
        if reference:
            batch = replace(batch, batch=replace(batch.batch, experts=None))
        names = {output.name for output in outputs}
        prompts = PROMPT_LOGPROBS in names
        buffer = self._buffer(batch, outputs, prompt_places(*batch.work) if prompts else None)
        passes = self._passes
        if temperature is not None:
            passes = replace(passes, temperature=temperature)
        record: ExpertRecord | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._weights(reference))
            stack.enter_context(logprob_format(self.config, self.precision))
            stack.enter_context(platform())
            if EXPERTS in names:
                record = stack.enter_context(self._routing.recording(batch.batch, self.device))
            buffer.fill(passes, self.batching.packed(*batch.work, prompts=prompts), outputs)
        scores = buffer.read()
        if record is None:
            return scores
        sources = prompt_sources(*batch.work, self.batching.packer.share)
        experts = record.read(sources, self.ranks.replica_group)
        return replace(scores, columns={**scores.columns, EXPERTS: experts})

    def update(
        self,
        batch: LocalBatch,
        loss: TokenLoss,
        outputs: Outputs = (),
        *,
        scores: Outputs | None = None,
    ) -> UpdateResult:
        buffer = None if scores is None else self._buffer(batch, scores)
        totals = self.backward(batch, loss, outputs, buffer=buffer)
        rate = optimizer.rate_of_run(self.optimizer_steps, self.optim, self.settings)
        with platform():
            norm, skipped = optimizer.step(self.optimizer, self.optim, rate, totals.loss)
        self.optimizer_steps += 1
        taken = None if buffer is None else buffer.read()
        metrics = totals.metrics | self._routing.end_update(skipped=skipped)
        return UpdateResult(totals.loss, norm, rate, skipped, metrics, taken)

    def backward(
        self,
        batch: LocalBatch,
        loss: TokenLoss,
        outputs: Outputs = (),
        *,
        buffer: ScoreBuffer | None = None,
    ) -> Totals:
        """Collective: loss and metrics of the minibatch, the first half of an update. Its gradient
        stays in the parameters, until a reference pass takes that memory."""
        self._offload.require("weights", "gradients", "optimizer")
        with platform():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            consume = loss_consumer(loss, outputs, self.ranks, buffer)
            packed = self.batching.packed(*batch.work)
            every = outputs if buffer is None else all_outputs(outputs, buffer.outputs)
            collected = self._passes.train(packed, consume, every)
        return reduce_totals(collected, self.ranks)

    def _buffer(
        self, batch: LocalBatch, outputs: Outputs, prompt_places: Tensor | None = None
    ) -> ScoreBuffer:
        num_tokens = int(batch.batch.response_lengths.sum())
        return ScoreBuffer(num_tokens, outputs, self.ranks, self.device, prompt_places)

    @property
    def gathered_bytes_sent(self) -> int:
        """See protocols.WholeWeightSource. Every rank that needs a shard counts once, however the
        collectives route it."""
        return self.view.gather.bytes_sent

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.wait_for_param_gather()
        yield from self.view.gathered()

    def weight_shards(self) -> list[Shard]:
        """The parts of HF tensors that this rank holds, for a planned weight sync; the keys are
        those of ``weight``."""
        return [shard for item in self.view.served for shard in item.shards]

    def weight(self, key: str) -> Tensor:
        """This rank's parameter of that key, as it is now (after ``wait_for_param_gather``), with
        its adapters merged. Raises KeyError."""
        return self.view.weight(key)

    def wait_for_param_gather(self) -> None:
        """Collective: finishes an overlapped gathering of parameters. Called before the weights,
        which must not be offloaded, are read."""
        self._offload.require("weights")
        self.view.forget()
        if self.parallel.overlap_param_gather:
            with platform():
                finish_param_gather(self.chunks)

    def check_weights(self, step: int) -> None:
        self.wait_for_param_gather()
        steps = self.optimizer_steps
        rate = optimizer.rate_of_run(steps - 1, self.optim, self.settings) if steps else None
        named = [(item.parameter.names, item.tensor) for item in self.held]
        check_weights(named, self.device, step, rate)

    @contextlib.contextmanager
    def _weights(self, reference: bool) -> Iterator[None]:
        """The reference weights in place of the trained ones, for the duration of a reference
        pass."""
        if not reference:
            yield
            return
        if self.view.adapters:
            with switched_off(self.view.adapters):
                yield
            return
        assert self.reference is not None, "reference passes need keep_reference=True"
        self._offload.require("weights", "gradients")  # whose memory the pass may use
        self.wait_for_param_gather()
        with self.reference.lent():
            yield

    def renew_reference(self) -> None:
        """Collective: the reference becomes the policy as it is now, where one is kept. Drops
        gradients."""
        if self.reference is not None:
            self._offload.require("weights", "gradients")
            self.wait_for_param_gather()
            self.reference.fill()

    def offload(self, parts: Sequence[str]) -> None:
        if "weights" not in self._offload.away:
            self.wait_for_param_gather()
        if "gradients" in parts:
            self.optimizer.zero_grad()  # copies of gradients, and views into their buffers
        if parts:
            release_caches(self.modules, self._dispatchers)
        self._offload.offload(parts)

    def reload(self) -> None:
        self._offload.reload()

    def save(self, path: Path, extra: Values, about: Values | None = None) -> None:
        self._offload.require("weights", "gradients", "optimizer")
        checkpoint.save(self, path, extra, about)

    def start_save(
        self, path: Path, extra: Values, about: Values | None = None, after: After = None
    ) -> CheckpointSave:
        self._offload.require("weights", "gradients", "optimizer")
        return checkpoint.start(self, path, extra, about, after)

    def load(self, path: Path) -> Values:
        self._offload.require("weights", "gradients", "optimizer")
        return checkpoint_loading.load(self, path)

    def export(self, path: Path) -> None:
        self._offload.require("weights")
        adapters = None
        if self.view.adapters:
            self.wait_for_param_gather()
            tensors = dict(self.view.gathered_adapters())
            adapters = partial(peft_format.write, tensors, self.arch, self.model)
        weights = self.gathered_weights()
        params = self.precision.params
        export.export_hf(weights, path, self.path, self.arch, params, adapters=adapters)

    def close(self) -> None:
        """Collective: drops megatron's process groups; another policy may then be built."""
        parallel_state.destroy_model_parallel()
