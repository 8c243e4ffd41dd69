"""A step of training waits for the device a fixed number of times, whatever the layers and
micro-batches (real megatron-core on a device that is played on the CPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics import host_waits_worker
from tests.numerics.simulated_device import SimulatedDevice
from tests.ranks import call

LAYERS, MICROBATCHES = (2, 4), (2, 4)
# Logprobs and entropies of all tokens, read once when the pass is over.
SCORES = {"passes.py:map: cpu": 2}
# Once an update: losses and metrics of all micro-batches, and the gradient norm (the sum that
# megatron makes on the host is only for layers without fused kernels).
UPDATE = {
    "forward.py:_numbers: tolist": 1,
    "utils.py:local_multi_tensor_l2_norm: tensor": 1,
    "clip_grads.py:get_grad_norm_fp32: _local_scalar_dense": 1,
}
BUDGET = {"logprobs": SCORES, "update": SCORES | UPDATE}
# Of a layer and micro-batch: megatron's experts without Transformer Engine.
EXPERTS = {
    "moe_utils.py:sort_chunks_by_idxs: tolist": 3,
    "experts.py:forward: tolist": 1,
}
LOAD = {"logprobs": {}, "update": {"expert_load.py:load_metrics: tolist": 1}}
ROTARY = "rope_utils.py:_apply_rotary_pos_emb_thd"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = call(1, host_waits_worker.figures, tmp_path_factory.mktemp("waits"), timeout=250)
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("others")
    (found,) = call(1, host_waits_worker.figures_of_others, folder, timeout=250)
    return found


@pytest.mark.parametrize("action", list(BUDGET))
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("number", MICROBATCHES)
@pytest.mark.parametrize("kind", ["experts", "latent"])
@pytest.mark.full
def test_with_experts_only_their_sizes_are_waited_for(others, action, layers, number, kind):
    """Beside latent attention, whose angles are those of every token, the first layer is dense."""
    found = others[f"{layers} {kind}"][f"{action} {number}"]
    with_experts = layers - (kind == "latent")
    sizes = {place: count * with_experts * number for place, count in EXPERTS.items()}
    assert found["waits"] == BUDGET[action] | LOAD[action] | sizes
    if kind == "latent":
        assert found["vendor"] == {}


@pytest.mark.parametrize("action", list(BUDGET))
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("number", MICROBATCHES)
@pytest.mark.parametrize("kind", [pytest.param("images", marks=pytest.mark.full), "fused"])
def test_nothing_grows(request, action, layers, number, kind):
    """With images neither in the tower nor in layers, whose angles are those of every token; nor
    with the fused rotary embedding, also nothing that only a GPU refuses: a tensor of the host
    among those of the device."""
    all_figures = request.getfixturevalue("others" if kind == "images" else "figures")
    found = all_figures[f"{layers} {kind}"][f"{action} {number}"]
    assert found["waits"] == BUDGET[action]
    assert found["vendor"] == {}


@pytest.mark.parametrize("action", list(BUDGET))
@pytest.mark.parametrize("number", MICROBATCHES)
def test_without_it_only_the_rotary_embedding_grows(figures, action, number):
    """Twice a layer (query and key) it reads the boundaries, and asks for the last, of the two
    micro-batches with several sequences; a sequence alone has the angles of its tokens."""
    for layers in LAYERS:
        found = figures[f"{layers} plain"][f"{action} {number}"]
        assert found["waits"] == BUDGET[action]
        assert set(found["vendor"]) == {f"{ROTARY}: tolist", f"{ROTARY}: _local_scalar_dense"}
        assert found["vendor"][f"{ROTARY}: tolist"] == 2 * layers * 2
        assert found["vendor"][f"{ROTARY}: _local_scalar_dense"] >= 2 * layers * 2


@pytest.mark.parametrize("layers", LAYERS)
def test_the_stand_in_for_the_fused_kernel_computes_the_same(figures, layers):
    fused, plain = (
        torch.tensor(figures[f"{layers} {kind}"]["first"]) for kind in ("fused", "plain")
    )
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)


def test_copies_to_the_device_are_queued(figures):
    """Of a micro-batch: what the model is given, and four vectors of its tokens; what belongs to
    responses goes once an update."""
    for layers in LAYERS:
        two, four = (
            figures[f"{layers} fused"][f"update {number}"]["queued"] for number in MICROBATCHES
        )
        assert {place: four[place] - two[place] for place in two} == {
            "microbatches.py:pack": 2 * 4,
            "microbatches.py:_packing": 2 * 1,
            "minibatch_loss.py:tokens": 2 * 4,
            "minibatch_loss.py:_to": 0,
            "forward.py:read": 0,
            "attention.py:group": 2 * 2,  # not with Transformer Engine
        }


HOST = torch.device("cpu")
# What is done with a tensor of the device and one of the host -> how often the host waits.
CASES = {
    "scalar": (lambda there, here: float(there.sum()), 1),
    "truth": (lambda there, here: bool((there > 0).all()), 1),
    "list": (lambda there, here: there.tolist(), 1),
    "mask": (lambda there, here: there[there > 0], 1),
    "mask_write": (lambda there, here: there.__setitem__(there > 0, 1.0), 1),
    "places": (lambda there, here: torch.nonzero(there), 1),
    "host_index": (lambda there, here: there[here.long()], 1),
    "sum_with_host": (lambda there, here: there + here, 1),
    "to_host": (lambda there, here: there.cpu(), 1),
    "to_host_by_name": (lambda there, here: there.to("cpu"), 1),
    "to_device": (lambda there, here: here.to(HOST), 1),
    "made_there": (lambda there, here: torch.tensor([1.0], device=HOST), 1),
    "written_there": (lambda there, here: there.copy_(here), 1),
    "unknown_size": (lambda there, here: torch.repeat_interleave(there, there.long()), 1),
    "in_backward": (
        lambda there, here: there.clone().requires_grad_().pow(2).sum().backward(),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_device_that_is_played_notices(name):
    action, waits = CASES[name]
    device = SimulatedDevice(())
    there, here = torch.ones(3), torch.ones(3)
    device.put(there)
    with device.watched():
        action(there, here)
        assert sum(device.waits.values()) == waits, device.waits
        device.clear()
        if name not in ("to_device", "made_there"):
            action(here.clone(), here.clone())
    assert not device.waits, "on the host nothing is waited for"
