"""Quantized layers of a tensor-parallel engine are processed in one order, whatever order shards
arrive in.

Two ranks of one engine have layers whose shards agree on a scale when they are processed. The
shards arrive in opposite orders, and rank 1 may wait in the middle for a message that rank 0 sends
late: what happens with weights that come by a plan.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.model_loader.reload import layerwise

from megatron_rl.engine.weights.worker import ShardReceiver, processing_is_collective
from tests.ranks import on_ranks

LAYERS = ("one", "two", "three")
SIZE = 4


class AgreedScale(QuantizeMethodBase):
    """The scale is the largest absolute value of the whole matrix, of which each rank has a
    shard."""

    def create_weights(self, layer: nn.Module, *arguments: object, **options: object) -> None:
        layer.weight = nn.Parameter(torch.zeros(SIZE, SIZE), requires_grad=False)

    def apply(self, layer: nn.Module, *arguments: object, **options: object) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        amax = quant_utils.weight_amax(layer.weight).reshape(1)
        amax = quant_utils.amax_for_tp_weight_quant(amax, True)
        layer.weight = nn.Parameter(layer.weight / amax, requires_grad=False)
        layer.scale = nn.Parameter(amax, requires_grad=False)


def make_model() -> nn.Module:
    """Loaded once, as an engine is when it has started."""
    model = nn.Module()
    for name in LAYERS:
        layer = nn.Module()
        layer.quant_method = AgreedScale()
        layer.quant_method.create_weights(layer)
        model.add_module(name, layer)
    layerwise.record_metadata_for_reloading(model)
    for name in LAYERS:
        layer = model.get_submodule(name)
        layer.weight.data.fill_(1.0)
        layer.quant_method.process_weights_after_loading(layer)
    return model


def value(name: str, rank: int) -> float:
    """Largest on rank 1 for layer one, on rank 0 for the others."""
    return float({"one": 2 + rank, "two": 20 - rank, "three": 200 - rank}[name])


def write_all(
    order: tuple[str, ...], wait_before: str | None, group: dist.ProcessGroup
) -> Callable[..., None]:
    """A transfer with the shards of ``order``. Rank 1 waits for rank 0 before layer
    ``wait_before``; rank 0 sends when its own shards are written."""
    rank = dist.get_rank()

    def transfer(parameter: Callable[[str], Tensor], written: Callable[[str], None]) -> None:
        for name in order:
            if rank == 1 and name == wait_before:
                dist.recv(torch.zeros(1), src=0, group=group)
            parameter(f"{name}.weight").fill_(value(name, rank))
            written(f"{name}.weight")
        # The memory plan counts on it: all of them are held at once, not yet processed.
        held = {name: parameter(f"{name}.weight").unique().tolist() for name in order}
        assert held == {name: [value(name, rank)] for name in order}, held
        if rank == 0 and wait_before is not None:
            dist.send(torch.zeros(1), dst=1, group=group)

    return transfer


def check(wait_before: str | None, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    model = make_model()
    kernel_tensors = {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
    config = SimpleNamespace(
        quant_config=object(),
        parallel_config=SimpleNamespace(world_size_across_dp=2),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    # What weight_shards finds out from a loader: all parameters, written whole.
    receiver = ShardReceiver(model, config)
    receiver.keys = {f"{layer}.weight" for layer in LAYERS}
    receiver.receive(write_all(LAYERS if rank == 0 else LAYERS[::-1], wait_before, group))
    for layer in LAYERS:
        scale = max(value(layer, 0), value(layer, 1))
        module = model.get_submodule(layer)
        assert module.scale.tolist() == [scale], f"{layer}: {module.scale.tolist()}, not {scale}"
        assert torch.equal(module.weight, torch.full((SIZE, SIZE), value(layer, rank)) / scale), (
            layer
        )
    now = {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
    assert now == kernel_tensors, "a captured graph reads the old addresses"


@pytest.mark.full
@pytest.mark.parametrize("wait_before", [None, "two"])
@on_ranks(2)
def test_shards_agree_on_the_scale_of_each_layer(wait_before: str | None) -> None:
    """Processed on arrival, layer one of rank 0 would meet layer three of rank 1, or wait for
    ever."""
    among_workers = dist.new_group(timeout=datetime.timedelta(seconds=20))
    quant_utils.get_tp_group = lambda: SimpleNamespace(device_group=among_workers)
    check(wait_before, among_workers)


@pytest.mark.parametrize(
    ("quant_config", "workers", "expected"),
    [(None, 4, False), (object(), 1, False), (object(), 2, True)],
)
def test_layers_wait_only_where_they_must(quant_config, workers, expected):
    """Waiting holds all layers before they are quantized: one worker, or plain weights, do
    without."""
    parallel = SimpleNamespace(world_size_across_dp=workers)
    config = SimpleNamespace(quant_config=quant_config, parallel_config=parallel)
    assert processing_is_collective(config) is expected
