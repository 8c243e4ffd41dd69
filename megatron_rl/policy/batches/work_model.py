"""How much work a sequence is: what balance over ranks goes by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    Parameter,
    expert_parameters,
    layer_parameters,
    local_shape,
)

Integers = Int[np.ndarray, " rows"]


@dataclass(frozen=True)
class WorkModel:
    """Work of a forward pass in units of what one token costs outside attention.

    ``crossover_tokens``: the length of a sequence whose causal attention costs as much as all its
    products with matrices. Example: with ``WorkModel(1000)`` a sequence of 500 tokens has work
    ``500 + 500 * 500 // 1000 = 750``.
    """

    crossover_tokens: int

    def __post_init__(self) -> None:
        assert self.crossover_tokens > 0

    @classmethod
    def of(cls, arch: Architecture) -> WorkModel:
        """That of a model, counted over its parameters.

        A token takes two operations for each parameter in the matrices that it passes through
        (output layer included, inactive experts not), and causal attention over n tokens
        ``2 * num_layers * attention_width * n**2``, the width being query heads x head dimension.
        A layer with linear attention has ``LinearAttention.products`` in the place of that.
        Example: Qwen2.5-7B (7.07e9 parameters, 28 layers, width 3584) has a crossover at 70,454
        tokens.
        """
        parameters = arch.vocab_size * arch.hidden_size
        if arch.linear is not None:
            parameters += arch.linear_layers * arch.linear.products
        for layer in range(arch.num_layers):
            parameters += _matrix_parameters(arch, layer_parameters(arch, layer))
            if arch.has_experts(layer):
                of_expert = _matrix_parameters(arch, expert_parameters(arch, layer, 0))
                parameters += arch.experts_per_token * of_expert
        return cls(parameters // (arch.attention_layers * arch.num_heads * arch.head_dim))

    def work(self, tokens: Integers, context: Integers | int = 0) -> Integers:
        """Work of ``tokens`` tokens that follow ``context`` others, without that of the context."""
        # n tokens after c others attend to (c + n)^2 - c^2 = n (n + 2 c) pairs, halved as all are.
        return tokens + tokens * (tokens + 2 * context) // self.crossover_tokens


def _matrix_parameters(arch: Architecture, parameters: Iterable[Parameter]) -> int:
    """Norms and biases are vectors, and left out."""
    shapes = [local_shape(parameter, arch, arch.vocab_size, 1) for parameter in parameters]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)
