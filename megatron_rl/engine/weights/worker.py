"""Runs inside the engine's worker: the receiving end of a weight update."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from megatron_rl.engine.routed_experts import SlotExperts
from megatron_rl.engine.weights.recorder import UndiscoveredError, partly_filled, record_shards
from megatron_rl.errors import first_few
from megatron_rl.models.parameter_map import part_of, tensor_slices
from megatron_rl.protocols import Transfer
from megatron_rl.types import Shard

# It warns of each layer whose loader has seen nothing: of all that are written shard by shard, and
# of a tied head.
logging.getLogger(layerwise.__name__).addFilter(
    lambda record: "Failed to load weights" not in str(record.msg)
)


class ShardReceiver:
    """The weights of one worker's model as shards: which it needs, and how they are replaced."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.shards: list[Shard] = []
        self.keys: set[str] = set()
        self.padded: set[str] = set()
        self.forms: dict[str, Tensor] = {}  # of each key, while it is loaded; without memory

    def discover(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Shard]:
        """The parts of the HF tensors ``shapes``, always the same ones, that this worker's loader
        takes, and where it puts them; recorded once. The weights stay."""
        if self.shards:
            return self.shards
        with _reloading(self.vllm_config, self.model, complete=False):
            self.shards, zeroed = record_shards(
                self.model.load_weights,
                shapes,
                dict(loadable(self.model)),
                self.vllm_config.model_config.dtype,
            )
            tensors = dict(loadable(self.model))
            self.keys = {shard.key for shard in self.shards}
            self.padded = partly_filled(self.shards, tensors) | zeroed
            self.forms = {
                key: torch.empty_like(tensors[key].data, device="meta") for key in self.keys
            }
        return self.shards

    def unreached(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """The weights of the model that no HF tensor of ``shapes`` is loaded into: they keep the
        values that they were built with.

        Raises:
            UndiscoveredError: the loader computes with the tensors, so it is unknown.
        """
        # A tied weight has several names and is loaded under any of them: each name -> the first.
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        same = {
            name: names[id(tensor)]
            for name, tensor in self.model.named_parameters(remove_duplicate=False)
        }
        self.discover(shapes)
        reached = self.keys | self.padded
        reached |= {same[key] for key in reached if key in same}
        with _reloading(self.vllm_config, self.model, complete=False):
            wanted = list(built_with_values(self.model))
        return [name for name in wanted if name not in reached and same.get(name) not in reached]

    def stored(self) -> Iterable[tuple[str, Tensor]]:
        """The weights in the files of the model."""
        loader = DefaultModelLoader(replace(self.vllm_config.load_config, load_format="auto"))
        return loader.get_all_weights(self.vllm_config.model_config, self.model)

    def receive_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by HF-named whole tensors, of which the shards are cut."""
        cut: dict[str, list[Shard]] = {}
        left = Counter(shard.key for shard in self.shards)
        for shard in self.shards:
            cut.setdefault(shard.name, []).append(shard)
        opened: dict[str, Tensor] = {}

        def transfer(parameter: Callable[[str], Tensor], written: Callable[[str], None]) -> None:
            for name, whole in weights:
                for shard in cut.get(name, ()):
                    key = shard.key
                    if key not in opened:
                        opened[key] = parameter(key)
                    part_of(opened[key], shard).copy_(whole[tensor_slices(shard)])
                    left[key] -= 1
                    if not left[key]:
                        del opened[key]
                        written(key)

        self.receive(transfer)

    @torch.no_grad()
    def receive(self, transfer: Transfer) -> None:
        """Replace all weights: ``transfer`` writes the shards found by ``discover``; a layer is
        processed as after any load (packed, quantized) as soon as its last shard is in place, and
        its memory before processing is freed. Where processing is collective, see
        ``processing_is_collective``, all layers wait for the end of ``transfer``.
        """
        with _reloading(self.vllm_config, self.model, complete=True):
            at_end = processing_is_collective(self.vllm_config)
            layers = OpenLayers(self.model, self.keys, self.padded, at_end=at_end)
            transfer(layers.parameter, layers.written)
            layers.close()
        if self.vllm_config.device_config.device.type == "cpu":
            repack_cpu(self.model)


class WeightReceiver:
    """Mixed into the engine's worker class (``worker_extension_cls``)."""

    model_runner: Any  # of the worker class
    vllm_config: Any

    @cached_property  # vLLM's worker calls no constructor of a class that is mixed into it
    def shard_receiver(self) -> ShardReceiver:
        """The one of this worker."""
        return ShardReceiver(self.model_runner.model, self.vllm_config)

    @property
    def copies_past_reload(self) -> bool:
        """Whether the loader of the model (GPT-OSS) copies experts and sinks past vLLM's reload,
        which would leave them as they are without a word."""
        kinds = {kind.__name__ for kind in type(self.model_runner.model).__mro__}
        return "GptOssForCausalLM" in kinds

    def make_stage_buffers(self) -> None:
        """What a later pipeline stage receives into. vLLM makes it in the trial forward of its
        start, which a CPU does not run."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def keep_experts(self) -> None:
        """From now on, for ``kept_experts``."""
        self.slot_experts = SlotExperts(self.model_runner)

    def kept_experts(self, name: str, num_tokens: int) -> Any:
        return self.slot_experts.read(name, num_tokens)

    def zero_positions(self) -> None:
        """After a sleep that dropped memory. The positions of multimodal rope lie in the pool of
        the weights, and a padded CUDA graph takes those that no request has written as indices."""
        state = getattr(self.model_runner, "model_state", None)  # of the model runner of GPUs
        rope = getattr(state, "rope_state", None)  # None: the model has none
        if rope is not None:
            rope.positions.zero_()

    def discover_shards(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Shard]:
        return self.shard_receiver.discover(shapes)

    def unreached(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why a sync would not fill an engine that was built without weights; "" where it would."""
        try:
            names = self.shard_receiver.unreached(shapes)
        except UndiscoveredError as error:
            return str(error)
        shown = ", ".join(first_few(names))
        return f"no tensor of the checkpoint is loaded into {shown}" if names else ""

    def load_files(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Reads all weights from the files of the model."""
        known = shapes if self.copies_past_reload else {}  # else vLLM's own loader takes them all
        self.receive_weights(self.shard_receiver.stored(), known)

    def receive_shards(self, transfer: Transfer) -> None:
        self.shard_receiver.receive(transfer)

    def receive_weights(
        self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Replace all weights by HF-named whole tensors ``shapes``; the worker keeps its own shard.

        The engine may hold a tensor until every tensor of the same layer has come, so none may be
        overwritten meanwhile. vLLM's loader takes 0.15 ms for each of thousands of experts: they,
        and what comes with them, are copied to where it would put them, if that can be recorded.
        """
        has_experts = any(".experts." in name for name in shapes)
        if self.copies_past_reload or (has_experts and self.vllm_config.quant_config is None):
            try:
                self.shard_receiver.discover(shapes)
            except UndiscoveredError:
                if self.copies_past_reload:
                    raise
            else:
                self.shard_receiver.receive_whole(weights)
                return
        self.reload_weights(weights_iterator=weights)
        if self.device.type == "cpu":
            repack_cpu(self.model_runner.model)


@contextmanager
def _reloading(vllm_config: Any, model: nn.Module, *, complete: bool) -> Iterator[None]:
    """vLLM's reload, layer by layer: parameters have the shapes of loading, on the meta device,
    until their layer is processed. ``complete=False``: no layer is processed, whatever its loader
    sees, and in the end all is as before. After an exception the layers that were processed are
    new, the others as before, and another reload may follow.
    """
    with set_current_vllm_config(vllm_config):
        layerwise.initialize_layerwise_reload(model)
        widened = widened_biases(model, vllm_config.model_config.dtype)
        for bias, _ in widened:
            bias.data = bias.data.to(vllm_config.model_config.dtype)
        if not complete:
            for layer in model.modules():
                # However many elements its loader sees, never as many as the layer has.
                layerwise.get_layerwise_info(layer).load_numel = float("-inf")
        finished = False
        try:
            yield
            finished = True
        finally:
            if complete and not finished:
                _leave_unprocessed(model)
            layerwise.finalize_layerwise_reload(model, vllm_config.model_config)
            if not (complete and finished):
                for bias, before in widened:
                    bias.data = before


def _leave_unprocessed(model: nn.Module) -> None:
    """Ends a reload that broke off: each layer that was not processed gets its old tensors back.
    The weights are then of two versions, and every layer can be loaded again."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = float("-inf")


def widened_biases(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Parameter, Tensor]]:
    """Biases that a kernel keeps in another type than the model's ``dtype``, with what they hold.

    A reload gives each parameter the form of loading, but never a bias. Some CPU kernels for
    bfloat16 turn biases into float32 whenever a layer is processed.
    """
    widened = []
    for layer in model.modules():
        bias = getattr(layer, "bias", None)
        if isinstance(bias, nn.Parameter) and hasattr(layer, "cpu_linear") and bias.dtype != dtype:
            widened.append((bias, bias.data))
    return widened


def built_with_values(model: nn.Module) -> Iterator[str]:
    """Names of what a load without weights fills with arbitrary numbers, during a reload.

    Not of attention layers: they hold scales of the cache alone, which every reload sets again.
    """
    for path, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            continue
        for name, tensor in layer.named_parameters(recurse=False):
            if tensor.is_floating_point():
                yield f"{path}.{name}" if path else name


def loadable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; a shared one under each of its names while a reload has given
    each its own."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def processing_is_collective(vllm_config: Any) -> bool:
    """Whether a layer, when processed, may talk to the other workers of its engine.

    With quantization it does: a scale is of the whole matrix, so its shards agree on the largest
    value. Shards arrive in another order on each worker. A layer processed at once would meet
    another layer of the other worker, or hold up messages that the other one waits for before it
    gets to this layer.
    """
    several = vllm_config.parallel_config.world_size_across_dp > 1
    return vllm_config.quant_config is not None and several


class OpenLayers:
    """Layers of a model in a reload, opened at the first write and processed when complete."""

    def __init__(
        self, model: nn.Module, keys: Iterable[str], padded: set[str], *, at_end: bool
    ) -> None:
        """``keys``: all parameters that will be written; those in ``padded`` only in part, their
        other elements are to be 0. ``at_end``: layers are processed by ``close``, in the order of
        the model's modules, the same on all workers; until then they are held as written.
        """
        self.model = model
        self.padded = padded
        self.at_end = at_end
        # Layer -> names of its parameters that are not complete.
        self.left: dict[str, set[str]] = {}
        for key in keys:
            layer, _, name = key.rpartition(".")
            self.left.setdefault(layer, set()).add(name)
        self.opened: set[str] = set()

    def parameter(self, key: str) -> Tensor:
        path, _, name = key.rpartition(".")
        layer = self.model.get_submodule(path)
        if path not in self.opened:
            materialize_layer(layer, layerwise.get_layerwise_info(layer))
            self.opened.add(path)
            for owner, _, padded in (each.rpartition(".") for each in self.padded):
                if owner == path:
                    getattr(layer, padded).zero_()
        return getattr(layer, name)

    def written(self, key: str) -> None:
        path, _, name = key.rpartition(".")
        self.left[path].remove(name)
        if not self.left[path] and not self.at_end:
            self._process(path)

    def close(self) -> None:
        """Every parameter was written to the end; with ``at_end`` the layers are processed now."""
        left = [f"{path}.{name}" for path, names in self.left.items() for name in names]
        assert not left, f"never completed: {sorted(left)[:5]}"
        if self.at_end:
            for path, _ in list(self.model.named_modules()):
                if path in self.left:
                    self._process(path)

    def _process(self, path: str) -> None:
        layer = self.model.get_submodule(path)
        layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))


def repack_cpu(model: nn.Module) -> None:
    """Rebuilds the packed copies that a reload of ``model`` leaves behind on CPU.

    A linear layer is packed into a kernel handle when it is processed after loading. The reload
    processes only layers whose own loader ran: the head of a tied model has none, and keeps the
    handle made from the old embedding. Experts are processed without their packing step. Neither
    raises; both then answer with wrong numbers.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
