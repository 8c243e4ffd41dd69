"""Two ranks of one engine with layers whose shards agree on a scale when they are processed.

The shards of the two ranks arrive in opposite orders, and rank 1 waits in the middle for a message
that rank 0 sends late: what happens with weights that come by a plan. Prints one line per case and
rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.model_loader.reload import layerwise

from megatron_rl.engine.weights.worker import ShardReceiver

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


def check(name: str, wait_before: str | None, group: dist.ProcessGroup) -> None:
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
    print(f"{name} passed on {rank}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    # Only what happens between the layers is limited: importing vLLM takes one rank longer than
    # another.
    among_workers = dist.new_group(timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    quant_utils.get_tp_group = lambda: SimpleNamespace(device_group=among_workers)
    check("opposite orders", None, among_workers)
    check("a message between layers", "two", among_workers)
    dist.destroy_process_group()
