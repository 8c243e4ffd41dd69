"""How many tokens each expert gets in an update, and what makes that even: losses of routers, and
steps of their biases. All count response tokens only: prompts are computed once or for every
response, but a response is computed once in every layout and cut into micro-batches."""

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config.schema import OptimConfig
from megatron_rl.models import Architecture


def load_metrics(load: Float[Tensor, "layers experts"]) -> dict[str, float]:
    """How uneven the load of experts is; reads the device once.

    Example: loads 3, 1, 0, 0 and 1, 1, 1, 1 of two layers are 3 and 1 times their means: 2 on
    average, 3 in the worst layer; 2 of 8 experts got no token.
    """
    uneven = load.amax(1) / load.mean(1)
    figures = torch.stack([uneven.mean(), uneven.amax(), (load == 0).double().mean()]).tolist()
    names = ("load_max_over_mean", "load_worst_layer_max", "unused_share")
    return {f"policy/expert_{name}": value for name, value in zip(names, figures, strict=True)}


def bias_step(load: Float[Tensor, " experts"], rate: float) -> Float[Tensor, " experts"]:
    """What is added to the biases of a router: more where the load is below the mean.

    Example: loads 3, 1, 0, 0 at rate 0.1 give -0.1, 0, 0.1, 0.1. Source: Wang et al. 2024,
    arXiv:2408.15664, algorithm 1, of DeepSeek-V3.
    """
    return (rate * (load.mean() - load).sign()).float()


class ExpertLoad:
    """The load of the experts of each layer in a pass, and the losses of their routers.

    A layer adds ``router_aux_loss_coef * experts * sum_i f_i P_i`` to the loss: f_i is the share of
    all choices that fell on expert i, P_i the mean of its score in those of its token, which sum to
    1; both over the minibatch, whose f is therefore counted before its first micro-batch. And
    ``router_z_loss_coef * mean(logsumexp(logits) ** 2)``.

    Sources: Fedus et al. 2021, arXiv:2101.03961, eq. 4, with f of the global batch: Qiu et al.
    2025, arXiv:2501.11873, eq. 4; Zoph et al. 2022, arXiv:2202.08906, eq. 5.
    """

    def __init__(self, arch: Architecture, optim: OptimConfig | None, device: torch.device) -> None:
        size = (arch.num_layers - arch.num_dense_layers, arch.num_experts)
        # Whole numbers, which float64 adds exactly in any order.
        self.counts = torch.zeros(size, dtype=torch.float64, device=device)
        self._load = self.counts  # of the minibatch
        self._arch = arch
        self._coefs = (optim.router_aux_loss_coef, optim.router_z_loss_coef) if optim else (0, 0)
        self.bias_rate = optim.router_bias_rate if optim else 0.0
        self.has_losses = any(self._coefs)

    def add(
        self, layer: int, chosen: Int[Tensor, "tokens k"], counted: Bool[Tensor, " tokens"]
    ) -> None:
        """The experts of a micro-batch on this rank; ``counted``: tokens of responses."""
        ones = counted.double()[:, None].expand(chosen.shape)
        self.counts[layer].scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))

    def total(self) -> Float[Tensor, "layers experts"]:
        """Collective: the sum over all ranks, each of which has counted its own tokens and layers.
        Losses use these counts from now on."""
        self._load = self.counts.clone()
        dist.all_reduce(self._load)
        return self._load

    def loss(
        self, layer: int, logits: Float[Tensor, "tokens experts"], counted: Bool[Tensor, " tokens"]
    ) -> Tensor:
        """What a micro-batch adds to the losses of a router on this rank."""
        load = self._load[layer]
        choices = load.sum()
        weight = (counted * (self._arch.experts_per_token / choices)).float()
        logits = logits.float()
        if self._arch.sigmoid_router:
            scores = logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        else:
            scores = logits.softmax(-1)
        even = len(load) * (weight @ scores * (load / choices).float()).sum()
        small = (weight * logits.logsumexp(-1).square()).sum()
        aux_coef, z_coef = self._coefs
        return aux_coef * even + z_coef * small
