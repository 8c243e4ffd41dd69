"""Shards recorded from loaders, against what the loaders do with real numbers."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from megatron_rl.engine.weights.recorder import UndiscoveredError, partly_filled, record_shards
from megatron_rl.types import Shard

SHAPES = {"q": (6, 4), "down": (3, 8), "norm": (4,), "expert": (2, 6), "scale": ()}
Weights = Iterable[tuple[str, Tensor]]


class Worker:
    """The second of two ranks: fused rows behind others, a column shard, a whole vector, one of
    three experts, padding."""

    def __init__(self, device: str) -> None:
        empty = {"qkv": (7, 4), "down": (5, 4), "norm": (4,), "experts": (3, 2, 3)}
        empty |= {"scale": (), "untouched": (2,)}
        self.parameters = {
            name: torch.full(shape, -1.0, device=device) for name, shape in empty.items()
        }

    def load(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name)(tensor)

    def q(self, tensor: Tensor) -> None:
        self.parameters["qkv"].data.narrow(0, 4, 3).copy_(tensor.narrow(0, 3, 3))
        self.parameters["qkv"].data[:4].zero_()

    def down(self, tensor: Tensor) -> None:
        self.parameters["down"].data[:3].copy_(tensor.chunk(2, dim=1)[1])
        self.parameters["down"].data[3:].fill_(0)

    def norm(self, tensor: Tensor) -> None:
        self.parameters["norm"].data.copy_(tensor.view(1, 4)[0])

    def expert(self, tensor: Tensor) -> None:
        self.parameters["experts"].data[1].copy_(tensor[:, 3:])

    def scale(self, tensor: Tensor) -> None:
        self.parameters["scale"].data.copy_(tensor)


def recorded(worker: Worker) -> list[Shard]:
    return record_shards(worker.load, SHAPES, worker.parameters, torch.float32)[0]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_copying_the_shards_does_what_the_loader_does(device):
    shards = recorded(Worker(device))
    full = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    loaded, copied = Worker("cpu"), Worker("cpu")
    loaded.load(full.items())
    for key in partly_filled(shards, copied.parameters):
        copied.parameters[key].zero_()
    for shard in shards:
        window = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.shape, strict=True))
        place = copied.parameters[shard.key].as_strided(shard.shape, shard.stride, shard.offset)
        place.copy_(full[shard.name][window])
    # Never loaded: other elements of a parameter that is written are 0.
    loaded.parameters["experts"][[0, 2]] = 0
    for key, value in loaded.parameters.items():
        assert torch.equal(copied.parameters[key], value), key


def test_shards_by_hand():
    of = {shard.name: shard for shard in recorded(Worker("meta"))}
    assert of["q"] == Shard("q", (6, 4), (3, 0), (3, 4), 16, (4, 1), "qkv", "float32")
    assert of["down"] == Shard("down", (3, 8), (0, 4), (3, 4), 0, (4, 1), "down", "float32")
    assert of["expert"] == Shard("expert", (2, 6), (0, 3), (2, 3), 6, (3, 1), "experts", "float32")
    assert (of["scale"].shape, of["scale"].offset) == ((), 0)


def test_the_parameters_are_not_written():
    worker = Worker("cpu")
    recorded(worker)
    assert all((value == -1).all() for value in worker.parameters.values())


def test_a_transposed_destination_has_its_strides():
    target = torch.zeros(4, 6)
    (shard,), _ = record_shards(
        lambda weights: target.t().copy_(dict(weights)["q"]),
        {"q": (6, 4)},
        {"p": target},
        torch.float32,
    )
    assert (shard.start, shard.shape, shard.offset, shard.stride) == ((0, 0), (6, 4), 0, (1, 6))


def test_an_empty_copy_is_no_shard():
    target = torch.zeros(2, 4)

    def load(weights: Weights) -> None:
        target[:0].copy_(dict(weights)["q"].narrow(0, 6, 0))

    assert record_shards(load, {"q": (6, 4)}, {"p": target}, torch.float32) == ([], set())


def test_copies_of_views_and_zeros_are_followed():
    """As GPT-OSS is loaded: experts are turned first, and what another rank adds is zero."""
    target = {"q": torch.zeros(2, 6), "bias": torch.full((4,), -1.0)}

    def load(weights: Weights) -> None:
        read = dict(weights)
        target["q"].copy_(read["q"][:, 2:].t().contiguous())
        target["bias"].copy_(read["norm"].zero_())

    shapes = {"q": (6, 4), "norm": (4,)}
    shards, zeroed = record_shards(load, shapes, target, torch.float32)
    assert shards == [Shard("q", (6, 4), (0, 2), (6, 2), 0, (1, 6), "q", "float32")]
    assert zeroed == {"bias"} and (target["bias"] == -1).all()


def changed_before(target: Tensor, weights: Weights) -> None:
    target.copy_(dict(weights)["q"].mul_(2))


def partly_zero(target: Tensor, weights: Weights) -> None:
    source = dict(weights)["q"]
    source[:2].zero_()
    target.copy_(source)


def part_of_the_copy(target: Tensor, weights: Weights) -> None:
    target[:2].copy_(dict(weights)["q"].t().contiguous().t()[:2])


def computed(target: Tensor, weights: Weights) -> None:
    target.copy_(dict(weights)["q"] * 2)


def changed_afterwards(target: Tensor, weights: Weights) -> None:
    target.copy_(dict(weights)["q"])
    target.mul_(2)


def filled(target: Tensor, weights: Weights) -> None:
    target.fill_(len(dict(weights)))


def looked_at(target: Tensor, weights: Weights) -> None:
    target.fill_(dict(weights)["q"].sum().item())


def every_other_row(target: Tensor, weights: Weights) -> None:
    target[:3].copy_(dict(weights)["q"][::2])


def flattened(target: Tensor, weights: Weights) -> None:
    target.view(-1).copy_(dict(weights)["q"].view(-1))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (computed, "computes what it copies into p at q"),
        (changed_afterwards, "changes p by aten.mul_.Tensor at q"),
        (filled, "changes p by aten.fill_.Scalar at q"),
        (looked_at, "cannot be watched at q"),
        (every_other_row, r"a view of q that is no slice of it: shape \(3, 4\)"),
        (changed_before, "changes q by aten.mul_.Tensor"),
        (partly_zero, "changes q by aten.zero_.default"),
        (part_of_the_copy, "computes what it copies into p at q"),
        (flattened, r"a view of q that is no slice of it: shape \(24,\)"),
    ],
)
def test_a_loader_that_does_more_than_copy_slices_is_refused(
    load: Callable[[Tensor, Weights], None], words: str
):
    target = torch.zeros(6, 4)
    with pytest.raises(UndiscoveredError, match=words):
        record_shards(
            lambda weights: load(target, weights), {"q": (6, 4)}, {"p": target}, torch.float32
        )
