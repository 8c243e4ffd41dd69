"""The weights of a policy as mbridge (pip install --no-deps mbridge==0.15.1) exports them, for
comparison with the project's own ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.policy.megatron_policy import MegatronPolicy

LAYER = "model.layers.{layer_number}."


class MbridgeExport:
    """What a gathering sync asks of a policy, answered by mbridge's ``export_weights`` over the
    same model chunks. Collective."""

    def __init__(self, model: Path, policy: MegatronPolicy) -> None:
        """Raises ValueError for layouts whose bytes are not counted here."""
        from mbridge import AutoBridge  # not a dependency of the project

        parallel = policy.parallel
        if parallel.pipeline > 1 or policy.arch.num_experts:
            raise ValueError(
                "--mbridge: its bytes are counted for dense models on one pipeline stage; "
                f"got parallel.pipeline={parallel.pipeline} and {policy.arch.num_experts} experts"
            )
        self._policy, self.gathered_bytes_sent = policy, 0
        dtype = policy.held[0].tensor.dtype
        self._bridge = AutoBridge.from_pretrained(
            model, dtype=dtype, make_vocab_size_divisible_by=policy.vocab_rows
        )
        # Its get_model would set these two.
        self._bridge.vocab_size, self._bridge.padded_vocab_size = (
            policy.arch.vocab_size,
            policy.vocab_rows,
        )
        # It knows the norms by Transformer Engine's names only.
        self._bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{LAYER}input_layernorm.weight"]}
        norm = {"pre_mlp_layernorm.weight": [f"{LAYER}post_attention_layernorm.weight"]}
        self._bridge._MLP_MAPPING = {**self._bridge._MLP_MAPPING, **norm}
        cut = (
            item.tensor
            for item in policy.held
            if getattr(item.tensor, "tensor_model_parallel", False)
        )
        self._bytes_sent = (parallel.tensor - 1) * sum(tensor.nbytes for tensor in cut)

    @torch.no_grad()
    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) in mbridge's order."""
        self._policy.wait_for_param_gather()
        yield from self._bridge.export_weights(self._policy.modules)
        self.gathered_bytes_sent += self._bytes_sent

    def check(self) -> None:
        """Every tensor is there once, with the bits of the policy's own gathering."""
        own = dict(self._policy.gathered_weights())
        for name, tensor in self.gathered_weights():
            assert torch.equal(own.pop(name), tensor), f"mbridge exports another {name}"
        assert not own, f"mbridge does not export {sorted(own)}"
