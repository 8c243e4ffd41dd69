"""Weights beside those in use, on their way into the model."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_rl.engine.weights.transfer_backend import StagedWeights


def test_a_layer_gets_all_its_weights_before_the_next_is_opened():
    """In whatever order they came: a layer that is open holds memory of the device twice."""
    keys = [f"layers.{layer}.experts.{name}" for name in ("w13", "w2") for layer in range(3)]
    written: list[str] = []
    placed = {key: torch.zeros(2) for key in keys}
    receiver = SimpleNamespace(
        forms={key: torch.empty(2, device="meta") for key in keys},
        receive=lambda transfer: transfer(placed.__getitem__, written.append),
    )
    staged = StagedWeights(receiver)

    def arrive(parameter, _):
        for number, key in enumerate(keys):
            parameter(key).fill_(number)

    staged.take(arrive, 1)
    staged.put_in_place(1)
    assert [int(placed[key][0]) for key in keys] == list(range(6))
    layers = [key.split(".")[1] for key in written]
    assert sorted(written) == sorted(keys) and layers == ["0", "0", "1", "1", "2", "2"]
