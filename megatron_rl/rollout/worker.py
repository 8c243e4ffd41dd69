"""Runs inside the engine's worker: the receiving end of a weight update."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class WeightReceiver:
    """Mixed into the worker class of the engine (``worker_extension_cls``), beside its ``reload_weights``."""

    def receive_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by HF-named whole tensors; the worker keeps its own shard.

        The engine may hold a tensor until every tensor of the same layer has come, so none may be overwritten meanwhile.
        """
        self.reload_weights(weights_iterator=weights)
        if self.device.type == "cpu":
            repack_cpu(self.model_runner.model)


def repack_cpu(model: nn.Module) -> None:
    """Rebuilds the packed copies that a reload leaves behind on CPU, after all weights of ``model`` were replaced.

    A linear layer is packed into a kernel handle when it is processed after loading. The reload processes only layers whose own
    loader ran: the head of a tied model has none, and keeps the handle made from the old embedding. Experts are processed
    without their packing step. Neither raises; both then answer with wrong numbers.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
