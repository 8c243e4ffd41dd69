"""How many tokens each expert gets in an update."""

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.models import Architecture


def load_metrics(load: Float[Tensor, "layers experts"]) -> dict[str, float]:
    """How uneven the load of experts is; reads the device once.

    Example: loads 3, 1, 0, 0 and 1, 1, 1, 1 of two layers are 3 and 1 times their means: 2 on
    average, 3 in the worst layer; 2 of 8 experts got no token.
    """
    uneven = load.amax(1) / load.mean(1)
    figures = torch.stack([uneven.mean(), uneven.amax(), (load == 0).double().mean()])
    names = ("load_max_over_mean", "load_worst_layer_max", "unused_share")
    return {
        f"policy/expert_{name}": value for name, value in zip(names, figures.tolist(), strict=True)
    }


class ExpertLoad:
    """Tokens of responses that go to each expert of each layer.

    Tokens of prompts are left out: they are computed once or for every response, and a response
    once in every layout and cut into micro-batches.
    """

    def __init__(self, arch: Architecture, device: torch.device) -> None:
        layers = arch.num_layers - arch.num_dense_layers
        # Whole numbers, which float64 adds exactly in any order.
        self._counts = torch.zeros(layers, arch.num_experts, dtype=torch.float64, device=device)

    def start(self) -> None:
        self._counts.zero_()

    def add(
        self, layer: int, chosen: Int[Tensor, "tokens k"], counted: Bool[Tensor, " tokens"]
    ) -> None:
        """The experts of a micro-batch on this rank; ``counted``: tokens of responses."""
        ones = counted.double()[:, None].expand(chosen.shape)
        self._counts[layer].scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))

    def total(self) -> Float[Tensor, "layers experts"]:
        """Collective: over all ranks, each of which has counted its own tokens and layers."""
        total = self._counts.clone()
        dist.all_reduce(total)
        return total
