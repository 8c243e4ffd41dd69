"""Experts of each token: recorded in one pass of the policy, and taken again in others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter
from torch import Tensor

from megatron_rl.config.schema import OptimConfig
from megatron_rl.models import Architecture
from megatron_rl.models.experts import expert_bytes, expert_width, packed_experts, unpacked_experts
from megatron_rl.policy.batches.microbatches import Microbatch, prompt_owners
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.passes.expert_load import ExpertLoad, bias_step, load_metrics
from megatron_rl.runtime.device import to_device
from megatron_rl.types import SequenceBatch

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedRouter:
    """The choice of one layer's router, in the place of megatron's ``RouterReplay``, which has no
    tokens without experts and wants those of all routers at once.

    The weights of the chosen experts stay functions of the router's logits, with their gradient.

    Attributes:
        given: packed experts of the tokens of a micro-batch; None: the router chooses.
        counted: which of its tokens count for load and losses; None: this is not looked at.
        chosen: the experts of the last micro-batch.
    """

    def __init__(self, layer: int, num_bytes: int, load: ExpertLoad, *, runs_again: bool) -> None:
        self.layer = layer
        self.given: Tensor | None = None
        self.counted: Tensor | None = None
        self.chosen: Tensor | None = None
        self._num_bytes = num_bytes
        self._load = load
        self._runs_again = runs_again
        # For the backward of recomputed layers: schedules take micro-batches back in the order in
        # which they came, and several may be on their way.
        self._waiting: list[tuple[Tensor | None, Tensor | None]] = []

    def begin(self, given: Tensor | None, counted: Tensor | None, *, backward: bool) -> None:
        """Called before the forward of a micro-batch."""
        self.given = given
        self.counted = counted
        if backward and self._runs_again:
            self._waiting.append((given, counted))

    def end_pass(self) -> None:
        self.given = self.counted = None
        self.chosen = None
        self._waiting.clear()

    def take_logits(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Replaces megatron's z-loss, which a router begins with: returns its logits ``[tokens,
        experts]``, whose backward adds the gradient of its losses."""
        if not torch.is_grad_enabled():
            return logits
        if self._runs_again and self._waiting:
            self.given, self.counted = self._waiting.pop(0)
        if self.counted is None or not self._load.has_losses:
            return logits
        loss = self._load.loss(self.layer, logits, self.counted)
        return MoEAuxLossAutoScaler.apply(logits, loss)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """For megatron's router: (scores, experts) ``[tokens, k]`` of ``[tokens, experts]``."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.given is not None:
            experts, is_given = unpacked_experts(self.given, self._num_bytes)
            chosen = torch.where(is_given, experts, chosen)
            values = scores.gather(1, chosen)
        self.chosen = chosen
        return values, chosen


class ExpertRecord:
    """Experts of all tokens of a batch, written by the ranks whose routers choose them.

    The last row takes what is chosen for padding.
    """

    def __init__(self, batch: SequenceBatch, width: int, device: torch.device) -> None:
        size = (len(batch.token_ids) + 1, width)
        self._packed = torch.zeros(size, dtype=torch.uint8, device=device)

    def write(self, places: Tensor, first: int, packed: Tensor) -> None:
        """``packed``: bytes ``[first, ...)`` of the tokens at ``places``, -1 for padding."""
        at = to_device(places, self._packed.device)
        self._packed[at, first : first + packed.shape[1]] = packed

    def read(self, source: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Collective over the ranks that work on the batch; ``source``: see ``prompt_sources``."""
        if group is not None:
            dist.all_reduce(self._packed, group=group)
        return self._packed[to_device(source, self._packed.device)]


class Routing:
    """The routers of this rank's chunks, of a model with experts; without any it does nothing."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        arch: Architecture,
        ranks: Ranks,
        optim: OptimConfig | None = None,
    ) -> None:
        self._ranks = ranks
        self._record: ExpertRecord | None = None
        self._counts = False
        self.load: ExpertLoad | None = None
        self._biases: list[tuple[int, Any]] = []
        self._routers: dict[torch.nn.Module, list[ReplayedRouter]] = {}
        if not arch.num_experts:
            return
        self._num_bytes = expert_bytes(arch.num_experts)
        self._layer_bytes = arch.experts_per_token * self._num_bytes
        self._width = expert_width(arch)
        self.load = ExpertLoad(arch, optim, next(chunks[0].parameters()).device)
        config: Any = chunks[0].config
        self._is_cut = config.sequence_parallel
        again = config.recompute_granularity == "full"
        if config.recompute_granularity == "selective":
            again = "moe" in config.recompute_modules
        for chunk in chunks:
            found: list[Any] = [each for each in chunk.modules() if isinstance(each, TopKRouter)]
            for router in found:
                # Counted from 1, over all stages; the first ones may have no experts.
                layer = router.layer_number - 1 - arch.num_dense_layers
                replay = ReplayedRouter(layer, self._num_bytes, self.load, runs_again=again)
                router.router_replay = replay
                router.apply_z_loss = replay.take_logits
                self._biases.append((layer, router))
            self._routers[chunk] = [router.router_replay for router in found]

    def begin(self, chunk: torch.nn.Module, microbatch: Microbatch, *, backward: bool) -> None:
        """Called before ``microbatch`` goes through ``chunk``."""
        counted = None
        if self._counts and self._routers:
            counted = to_device(self._own(microbatch.in_response), microbatch.token_ids.device)
        for router in self._routers.get(chunk, ()):
            given = microbatch.experts
            if given is not None:
                given = self._own(given)[:, self._columns(router)]
            router.begin(given, counted, backward=backward)

    def end(self, chunk: torch.nn.Module, microbatch: Microbatch) -> None:
        """After it."""
        # Without sequence parallelism all tensor ranks have the same tokens: one writes.
        if not self._routers or (not self._is_cut and self._ranks.tensor_rank):
            return
        places = self._own(microbatch.places)
        for router in self._routers[chunk]:
            assert router.chosen is not None
            if self._record is not None:
                packed = packed_experts(router.chosen, self._num_bytes)
                self._record.write(places, self._columns(router).start, packed)
            if self.load is not None and router.counted is not None:
                self.load.add(router.layer, router.chosen, router.counted)

    @torch.no_grad()
    def end_update(self, *, skipped: bool) -> dict[str, float]:
        """Collective: metrics of the load of experts in the last pass that counted it, by which the
        biases of routers are moved, unless the step was ``skipped``."""
        if self.load is None:
            return {}
        load = self.load.total()
        if self.load.bias_rate and not skipped:
            for layer, router in self._biases:
                router.expert_bias.add_(bias_step(load[layer], self.load.bias_rate))
        return load_metrics(load)

    @contextmanager
    def in_pass(self, *, counts: bool) -> Iterator[None]:
        """Context of all micro-batches of a pass; clears what they leave, also after an error.
        ``counts``: counts the load of experts."""
        self._counts = counts
        if counts and self.load is not None:
            self.load.counts.zero_()
        try:
            yield
        finally:
            for routers in self._routers.values():
                for router in routers:
                    router.end_pass()

    @contextmanager
    def recording(self, batch: SequenceBatch, device: torch.device) -> Iterator[ExpertRecord]:
        """Context in which passes over ``batch`` record what their routers choose.

        Raises:
            ValueError: the model has no experts.
        """
        if not self._routers:
            raise ValueError("output experts: the model has none; leave it out")
        self._record = ExpertRecord(batch, self._width, device)
        try:
            yield self._record
        finally:
            self._record = None

    def _own(self, values: Tensor) -> Tensor:
        """``values`` of the tokens that this tensor rank's routers see."""
        if not self._is_cut:
            return values
        return values.chunk(self._ranks.tensor)[self._ranks.tensor_rank]

    def _columns(self, router: ReplayedRouter) -> slice:
        # A row of packed experts has layer after layer of those with experts, over all stages.
        first = router.layer * self._layer_bytes
        return slice(first, first + self._layer_bytes)


def prompt_sources(
    batch: SequenceBatch, microbatches: Sequence[Sequence[int]], share: bool
) -> Int[Tensor, " all_tokens"]:
    """Where each token of ``batch`` was computed in a pass: a shared prompt with one row alone."""
    owner = prompt_owners(batch, microbatches, share)
    row = torch.repeat_interleave(torch.arange(batch.num_responses), batch.lengths)
    place = torch.arange(len(row))
    within = place - batch.offsets[row]
    of_owner = batch.offsets[owner[row]] + within
    return torch.where(within < batch.prompt_lengths[row], of_owner, place)
