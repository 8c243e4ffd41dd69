"""Losses and metrics of micro-batches, read from the device once: the numbers are those read one by
one."""

from __future__ import annotations

import torch

from megatron_rl.policy.passes.forward import _numbers


def test_the_numbers_are_those_read_one_by_one():
    draw = torch.Generator().manual_seed(1)

    def contribution(**metrics: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.randn((), generator=draw), metrics

    single = torch.randn((), generator=draw) / 3
    double = torch.randn((), generator=draw, dtype=torch.float64) / 3
    contributions = [
        contribution(a=single, b_max=double, tokens=torch.tensor(12_345_678)),
        contribution(),
        contribution(half=single.bfloat16(), of_one=single[None], bad=torch.tensor(float("inf"))),
    ]
    wanted = [
        (float(loss), {key: float(value) for key, value in metrics.items()})
        for loss, metrics in contributions
    ]
    assert _numbers(contributions) == wanted
    assert _numbers([]) == []
