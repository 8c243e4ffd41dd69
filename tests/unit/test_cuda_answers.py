"""Every place that asks whether there is a CUDA device is run here with the answer yes; what it
calls of the device is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.load import compose
from megatron_rl.config.rules.hardware import Machine
from tests.unit import cuda_checks_engine  # noqa: F401
from tests.unit.cuda_checks import CHECKS, Patch, asked_at
from tests.unit.cuda_sites import askers, sites

GIB = 2**30


@pytest.fixture
def cuda(monkeypatch: Patch) -> Patch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return monkeypatch


@pytest.mark.parametrize("site", sites())
def test_the_answer_yes(site: str, cuda: Patch, tmp_path: Any) -> None:
    assert site in CHECKS, f"{site} asks for a CUDA device: add a check of what it does with one"
    CHECKS[site](cuda, tmp_path)


def test_no_check_is_left_behind() -> None:
    assert not set(CHECKS) - set(sites())


def test_the_search_finds_what_it_looks_for() -> None:
    source = (
        "x = [_without_cuda]\nclass A:\n  def f(self):\n    return torch.cuda.is_available()\n"
        "def g():\n  def h(): ask(torch.cuda.is_available)\n  return torch.cuda.current_device()\n"
    )
    assert askers(source) == {"", "A.f", "g.h"}
    assert not askers("def f(): return torch.backends.cuda.is_built()")


@asked_at("runtime.device:platform")
def nothing_is_replaced(_: Patch, __: Any) -> None:
    from megatron_rl.runtime.device import STAND_INS, platform

    before = {name: getattr(torch.cuda, name) for name in STAND_INS}
    with platform():
        assert {name: getattr(torch.cuda, name) for name in STAND_INS} == before
        assert torch.zeros(1).type() == "torch.FloatTensor", "a function mode is in force"


@asked_at("runtime.device:device")
def the_device_is_this_rank_s(_: Patch, __: Any) -> None:
    from megatron_rl.runtime.device import device

    assert device() == torch.device("cuda", 3)


@asked_at("runtime.launch:start")
def nccl_beside_gloo(patch: Patch, _: Any) -> None:
    from megatron_rl.runtime import launch
    from megatron_rl.runtime.guard import failure

    seen: dict[str, Any] = {}
    control = object()
    given = dict(
        RANK=1,
        WORLD_SIZE=2,
        LOCAL_RANK=1,
        LOCAL_WORLD_SIZE=2,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=1,
    )
    for name, value in given.items():
        patch.setenv(name, str(value))

    def gather(cards: list[Any], card: Any, group: Any) -> None:
        seen["group"] = group
        cards[:] = [card, card]

    patch.setattr(launch, "prepare", lambda: None)
    patch.setattr(launch, "join", lambda backend, timeout_s: seen.update(backend=backend))
    patch.setattr(launch, "Heartbeat", lambda rank, peers: None)
    patch.setattr(failure, "joined", lambda rank, peers: None)
    patch.setattr(torch.cuda, "set_device", lambda index: seen.update(device=index))
    patch.setattr(
        dist, "new_group", lambda backend, timeout: control if backend == "gloo" else None
    )
    patch.setattr(dist, "get_rank", lambda: 1)
    patch.setattr(dist, "get_world_size", lambda group=None: 2)
    patch.setattr(dist, "all_gather_object", gather)
    world = launch.start()
    assert seen == {"device": 1, "backend": "cpu:gloo,cuda:nccl", "group": control}
    assert world.control_group is control, "objects travel over gloo"


@asked_at("runtime.joint_group:join_group")
def a_joint_group_has_nccl_too(patch: Patch, _: Any) -> None:
    from megatron_rl.runtime.joint_group import join_group, leave_group

    made: list[tuple[Any, ...]] = []
    store = dist.HashStore()

    class Nccl:
        """Stands where a build for CUDA has the class; what it makes is a group of gloo."""

        Options = SimpleNamespace

        def __new__(cls, *arguments: Any) -> Any:
            made.append(arguments)
            return dist.ProcessGroupGloo(dist.PrefixStore("played/", store), 0, 1)

    patch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    patch.setattr(dist, "get_rank", lambda: 0)
    group = join_group(store, 0, 1, 7.0)
    ((_, rank, size, options),) = made
    # Half of the limit of a command, see ``peer_timeout_s``.
    assert (rank, size, options._timeout.total_seconds()) == (0, 1, 3.5)
    on_gpu, on_host = (group._get_backend(torch.device(kind)) for kind in ("cuda", "cpu"))
    assert on_gpu is not on_host
    leave_group(group)


@asked_at("runtime.memory:memory_in_use")
def the_device_s_memory_is_measured(patch: Patch, _: Any) -> None:
    from megatron_rl.runtime.memory import memory_in_use

    patch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GIB)
    patch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GIB)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (69 * GIB, 80 * GIB))
    found = memory_in_use(lambda: 5 * GIB)
    assert found.pop("host") > 0
    assert found == {"allocated": 2.0, "reserved": 3.0, "engine": 5.0, "used": 11.0}


@asked_at("run.saved_settings:engine_of_machine")
def samples_come_from_the_engine_of_a_gpu(_: Patch, folder: Any) -> None:
    from megatron_rl.evaluation.sample import _values_of_model

    assert _values_of_model(folder)["rollout"] == compose("rollout/vllm")
    assert compose("rollout/vllm") != compose("rollout/vllm_cpu")


@asked_at("planning.at_start:smallest_budget")
def the_smallest_device_and_host_count(patch: Patch, _: Any) -> None:
    from megatron_rl.planning import at_start
    from megatron_rl.planning.phases import MemoryBudget

    patch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB)
    )
    patch.setattr(at_start, "available_gib", lambda: 512.0)
    world = SimpleNamespace(local_size=8, all_gather=lambda mine: [mine, (79.0, 100.0)])
    assert at_start.smallest_budget(world) == MemoryBudget("cuda", 79.0, 64.0)


@asked_at("policy.patches:_without_cuda")
@asked_at("policy.patches:")
def no_remedy_for_a_cpu_is_installed(patch: Patch, _: Any) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    from megatron_rl.policy import patches

    assert not patches._without_cuda()
    needed = [patch_.name for patch_ in patches.PATCHES if patch_.needed()]
    assert set(needed) <= {"te_general_gemm"}, needed
    # A new process, where nobody has made a tracker yet.
    patch.setattr(patches, "PATCHES", ())
    patch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    patch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    patches.apply()
    tracker = megatron_random.get_cuda_rng_tracker()
    with tracker.fork(), tracker.fork(megatron_random.get_expert_parallel_rng_tracker_name()):
        pass
    assert not tracker.is_initialized(), "layers of Transformer Engine would take it"


@asked_at("policy.hardware:this_machine")
def the_facts_of_a_gpu(patch: Patch, _: Any) -> None:
    from megatron_rl.policy import hardware

    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.setattr(hardware, "transformer_engine_version", lambda: "2.11.0")
    hardware.this_machine.cache_clear()
    try:
        assert hardware.this_machine() == Machine((9, 0), "2.11.0", "transformer_engine")
    finally:
        hardware.this_machine.cache_clear()


@asked_at("policy.model:transformer_config")
def weights_are_made_on_the_device(patch: Patch, _: Any) -> None:
    from megatron_rl.policy import model
    from tests.numerics.policy_cases import parallel
    from tests.unit.small_models import DENSE, precision

    patch.setattr(model, "this_machine", lambda: Machine((9, 0), None, "torch"))
    assert not model.transformer_config(DENSE, parallel(), precision()).use_cpu_initialization


@asked_at("policy.model:expert_fields")
def cut_experts_keep_their_dispatcher(patch: Patch, _: Any) -> None:
    from megatron_rl.policy import model
    from tests.numerics.policy_cases import parallel
    from tests.unit.small_models import EXPERTS, precision

    patch.setattr(model, "this_machine", lambda: Machine((9, 0), None, "torch"))
    cut = parallel(tensor=2, sequence=True, expert_tensor=2, pipeline=2)
    config = model.transformer_config(EXPERTS, cut, precision())
    assert config.moe_token_dispatcher_type == "alltoall"


@asked_at("policy.model:one_length")
def micro_batches_of_a_pipeline_have_one_length(patch: Patch, _: Any) -> None:
    from megatron_rl.policy import model
    from tests.numerics.policy_cases import parallel
    from tests.unit.small_models import DENSE, precision

    assert model.one_length()
    patch.setattr(model, "this_machine", lambda: Machine((9, 0), None, "torch"))
    assert not model.transformer_config(
        DENSE, parallel(pipeline=2), precision()
    ).variable_seq_lengths


@asked_at("policy.model:build_chunks")
def chunks_go_to_the_device(patch: Patch, _: Any) -> None:
    from megatron_rl.policy import model
    from tests.unit.small_models import DENSE

    moved: list[int] = []

    class Played:
        def __init__(self, **_: Any) -> None: ...

        def cuda(self, index: int) -> Played:
            moved.append(index)
            return self

    patch.setattr(model, "HiddenStates", Played)
    patch.setattr(model, "layer_spec", lambda *_: None)
    for end in ("first", "last"):
        patch.setattr(model.parallel_state, f"is_pipeline_{end}_stage", lambda **_: True)
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=2, tensor_model_parallel_size=1, bf16=False
    )
    settings = SimpleNamespace(make_vocab_divisible_by=8)
    chunks = model.build_chunks(config, DENSE, None, settings, 64)
    assert len(chunks) == 2 and moved == [3, 3]
