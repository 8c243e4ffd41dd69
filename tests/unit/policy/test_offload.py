"""Storages that are emptied and filled again under the tensors that use them."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.policy.state.offload import Offload, dispatcher_tensors, release_caches
from megatron_rl.runtime.device import platform

CPU = torch.device("cpu")


def junk() -> None:
    """Overwrites the memory that was just freed."""
    for _ in range(50):
        torch.full((64,), -7.0)


def make(dropped=()):
    buffer = torch.arange(64.0)
    views = [buffer[:10].view(2, 5), buffer[10:]]
    moments = [torch.full((64,), 3.0), torch.tensor(2.0)]
    # The optimizer of float32 weights steps on the weights themselves.
    parts = {"weights": lambda: views, "optimizer": lambda: [*moments, views[1]]}
    return Offload(parts, dropped, CPU), views, moments


def test_views_of_one_storage_come_back_with_their_values():
    offload, views, moments = make()
    storage = views[0].untyped_storage()
    offload.offload(["weights", "optimizer"])
    assert storage.nbytes() == 0 and moments[0].untyped_storage().nbytes() == 0
    junk()
    offload.reload()
    assert views[0].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and views[1].tolist() == list(
        range(10, 64)
    )
    assert moments[0].tolist() == [3.0] * 64 and moments[1].item() == 2.0
    views[1][0] = -1.0
    assert views[0]._base is views[1]._base and views[0]._base[10] == -1.0


def test_what_two_parts_share_belongs_to_the_first():
    offload, views, moments = make()
    offload.offload(["optimizer"])
    assert views[1].tolist() == list(range(10, 64)) and moments[0].untyped_storage().nbytes() == 0
    assert offload.away == ("optimizer",)
    offload.offload(["weights"])
    assert views[1].untyped_storage().nbytes() == 0
    offload.reload()
    assert views[0][1, 4] == 9 and moments[1] == 2 and offload.away == ()


def test_dropped_parts_come_back_as_zeros():
    offload, views, moments = make(dropped=("weights",))
    offload.offload(["weights", "optimizer"])
    junk()
    offload.reload()
    assert views[0]._base.tolist() == [0.0] * 64 and moments[0].tolist() == [3.0] * 64


def test_the_values_of_the_second_time_count_and_the_host_buffers_are_used_again():
    offload, views, _ = make()
    offload.offload(["weights"])
    host = offload._away["weights"][0].host
    offload.offload(["weights"])  # away already
    offload.reload()
    views[0].fill_(5.0)
    offload.offload(["weights"])
    assert offload._away["weights"][0].host is host
    junk()
    offload.reload()
    assert views[0].tolist() == [[5.0] * 5] * 2 and views[1][0] == 10


def test_reading_what_is_away_is_refused():
    offload, _, _ = make()
    offload.require("weights", "optimizer")
    offload.offload(["weights"])
    offload.require("optimizer")
    with pytest.raises(RuntimeError, match=r"the policy's weights are offloaded; call reload\(\)"):
        offload.require("optimizer", "weights")
    with pytest.raises(
        ValueError, match="no part is called activations; there are weights, optimizer"
    ):
        offload.offload(["activations"])


def test_what_a_dispatcher_learned_in_a_pass_is_released_and_what_it_was_built_with_stays():
    class Dispatcher:
        def __init__(self) -> None:
            self.order = torch.arange(3)
            self.probs = None
            self.count = 3

    layer = torch.nn.Linear(1, 1)
    outer = torch.nn.Module()
    layer.token_dispatcher = Dispatcher()
    layer._fp8_workspaces = {"weight": torch.ones(3)}
    outer.layer = layer
    kept = dispatcher_tensors([outer])
    layer.token_dispatcher.probs = torch.ones(5)
    release_caches([outer], kept)
    assert layer.token_dispatcher.probs is None and layer._fp8_workspaces == {}
    assert layer.token_dispatcher.order.tolist() == [0, 1, 2] and layer.token_dispatcher.count == 3


def test_rotary_tables_are_forgotten():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    with platform():
        rotary(4)
    assert RotaryEmbedding.forward.cache_info().currsize > 0
    release_caches([rotary], {})
    assert RotaryEmbedding.forward.cache_info().currsize == 0
