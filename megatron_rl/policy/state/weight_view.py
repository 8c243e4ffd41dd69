"""Which weights are frozen, served and saved, and those that leave the policy."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models import Architecture
from megatron_rl.policy.adapters import Adapter, adapters_by_weight
from megatron_rl.policy.parallel import Ranks
from megatron_rl.policy.precision import plain
from megatron_rl.policy.state.gathered_weights import Gather
from megatron_rl.policy.state.weights import LocalParameter
from megatron_rl.runtime.device import platform
from megatron_rl.runtime.digest import combined_digest, tensor_digest
from megatron_rl.runtime.launch import from_first_rank


class WeightView:
    """This rank's parameters by what becomes of them. Building it is collective.

    Without adapters all are served and saved. With them the adapters are trained and saved, and
    the weights are served, with their adapters merged.

    Attributes:
        frozen: keep the values that were read.
        served: what engines and exports get, by the names of the HF model.
        saved: what a checkpoint holds.
        adapters: by the weight that they are added to.
        gather: of what is served; ``gather_saved``: of what is saved.
    """

    def __init__(
        self,
        held: Sequence[LocalParameter],
        modules: Sequence[torch.nn.Module],
        arch: Architecture,
        ranks: Ranks,
        vocab_rows: int,
    ) -> None:
        of_adapters = [item for item in held if item.parameter.is_adapter]
        self.frozen = [item for item in held if not item.tensor.requires_grad]
        self.served = [item for item in held if not item.parameter.is_adapter]
        self.saved = of_adapters or self.served
        self.adapters: dict[Tensor, Adapter] = {}
        for module in modules:
            self.adapters |= adapters_by_weight(module)
        self._by_key = {item.key: item.tensor for item in self.served}
        self._merged: dict[str, Tensor] = {}  # the weight that was last asked for
        self.gather = Gather(self.served, arch, ranks, vocab_rows)
        self.gather_saved = self.gather
        if of_adapters:
            self.gather_saved = Gather(of_adapters, arch, ranks, vocab_rows)

    def forget(self) -> None:
        """Drops the merged weight, which is out of date."""
        self._merged = {}

    def weight(self, key: str) -> Tensor:
        """This rank's parameter of that key as engines get it, merged once for all slices that are
        asked for one after the other. Raises KeyError."""
        parameter = self._by_key[key]
        if parameter not in self.adapters:
            return plain(parameter)
        if key not in self._merged:
            self._merged = {key: self._value(parameter)}
        return self._merged[key]

    @torch.no_grad()
    def _value(self, parameter: Tensor) -> Tensor:
        adapter = self.adapters.get(parameter)
        return plain(parameter) if adapter is None else adapter.merged(parameter)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: what is served, by HF name, whole."""
        yield from self.gather.run(self._value)

    def gathered_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: the adapters, by HF name, whole; nothing without adapters."""
        if self.adapters:
            yield from self.gather_saved.run()

    def base_digest(self) -> str | None:
        """Collective: of the weights without adapters, by HF name, the same in every layout; None
        where these are trained."""
        if not self.adapters:
            return None
        is_main = dist.get_rank() == 0
        with platform():
            tensors = self.gather.run(plain)
            digests = {name: tensor_digest(values) for name, values in tensors if is_main}
        return from_first_rank(partial(combined_digest, digests))
