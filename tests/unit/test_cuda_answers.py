"""Every place that asks whether there is a CUDA device is run by a test with the answer yes; what
it calls of the device is played."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.load import compose
from megatron_rl.config.rules.hardware import Machine
from megatron_rl.config.schema import RolloutConfig

GIB = 2**30
PACKAGE = Path(__file__).resolve().parent.parent.parent / "megatron_rl"
HERE = "test_cuda_answers.py"
# Place -> the file below tests/unit that runs it with the answer yes.
ANSWERED = {
    "engine.arguments:_of_the_device": "engine/test_engine_calls.py",
    "engine.engine:VllmEngine.__init__": "engine/test_engine_calls.py",
    "engine.engine:VllmEngine._build": "engine/test_engine_calls.py",
    "engine.requirements:check_start": "engine/test_requirements.py",
    "engine.serving.server:start_server": HERE,
    "engine.side_effects:prepare_import": HERE,
    "engine.side_effects:EngineStream.__init__": "engine/test_streams.py",
    "engine.weights.transfer_backend:StagedWeights._parameter": HERE,
    "planning.at_start:smallest_budget": HERE,
    "policy.hardware:this_machine": HERE,
    "policy.model:build_chunks": HERE,
    "policy.model:expert_fields": HERE,
    "policy.model:fused_kernels": "policy/test_model.py",
    "policy.model:one_length": HERE,
    "policy.model:transformer_config": HERE,
    "policy.patches:": HERE,
    "policy.patches:_without_cuda": HERE,
    "run.start:engine_of_machine": HERE,
    "runtime.device:device": HERE,
    "runtime.device:platform": HERE,
    "runtime.joint_group:join_group": HERE,
    "runtime.launch:start": HERE,
    "runtime.memory:memory_in_use": "runtime/test_memory.py",
}


def askers(node: ast.AST, inside: tuple[str, ...] = ()) -> set[str]:
    """Qualified names of the functions that ask; "" stands for the top of the module."""
    found = set()
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        found |= askers(child, (*inside, child.name) if is_named else inside)
        asks = isinstance(child, ast.Attribute | ast.Name)
        if asks and ast.unparse(child) in ("torch.cuda.is_available", "_without_cuda"):
            found.add(".".join(inside))
    return found


def test_every_place_that_asks_is_answered() -> None:
    places = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places |= {f"{module}:{name}" for name in askers(tree)}
    assert places == set(ANSWERED), "name the test that runs it with the answer yes"
    missing = [name for name in ANSWERED.values() if not (Path(__file__).parent / name).is_file()]
    assert not missing


def test_the_search_finds_what_it_looks_for() -> None:
    source = (
        "x = [_without_cuda]\nclass A:\n  def f(self):\n    return torch.cuda.is_available()\n"
        "def g():\n  def h(): ask(torch.cuda.is_available)\n  return torch.cuda.current_device()\n"
    )
    assert askers(ast.parse(source)) == {"", "A.f", "g.h"}
    assert not askers(ast.parse("def f(): return torch.backends.cuda.is_built()"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return monkeypatch


def test_nothing_of_the_platform_is_replaced(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.runtime.device import STAND_INS, device, platform

    before = {name: getattr(torch.cuda, name) for name in STAND_INS}
    with platform():
        assert {name: getattr(torch.cuda, name) for name in STAND_INS} == before
        assert torch.zeros(1).type() == "torch.FloatTensor", "a function mode is in force"
    assert device() == torch.device("cuda", 3), "of this rank"


def test_objects_travel_over_gloo_and_tensors_over_nccl(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.runtime import launch
    from megatron_rl.runtime.guard import failure

    seen: dict[str, Any] = {}
    control = object()
    given = dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_PORT=1)
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1"}.items():
        cuda.setenv(name, str(value))

    def gather(cards: list[Any], card: Any, group: Any) -> None:
        seen["group"] = group
        cards[:] = [card, card]

    cuda.setattr(launch, "prepare", lambda: None)
    cuda.setattr(launch, "join", lambda backend, timeout_s: seen.update(backend=backend))
    cuda.setattr(launch, "Heartbeat", lambda rank, peers: None)
    cuda.setattr(failure, "STATE", failure.State())  # which learns who the ranks are
    cuda.setattr(torch.cuda, "set_device", lambda index: seen.update(device=index))
    cuda.setattr(dist, "new_group", lambda backend, timeout: control if backend == "gloo" else None)
    cuda.setattr(dist, "get_rank", lambda: 1)
    cuda.setattr(dist, "get_world_size", lambda group=None: 2)
    cuda.setattr(dist, "all_gather_object", gather)
    cuda.setattr(launch, "_configure_logging", lambda rank: None)  # that of the tests stays
    world = launch.start()
    assert seen == {"device": 1, "backend": "cpu:gloo,cuda:nccl", "group": control}
    assert world.control_group is control


def test_a_joint_group_has_nccl_too(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.runtime.joint_group import join_group, leave_group

    made: list[tuple[Any, ...]] = []
    store = dist.HashStore()

    class Nccl:
        """Stands where a build for CUDA has the class; what it makes is a group of gloo."""

        Options = SimpleNamespace

        def __new__(cls, *arguments: Any) -> Any:
            made.append(arguments)
            return dist.ProcessGroupGloo(dist.PrefixStore("played/", store), 0, 1)

    cuda.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    cuda.setattr(dist, "get_rank", lambda: 0)
    group = join_group(store, 0, 1, 7.0)
    ((_, rank, size, options),) = made
    # Half of the limit of a command, see ``peer_timeout_s``.
    assert (rank, size, options._timeout.total_seconds()) == (0, 1, 3.5)
    on_gpu, on_host = (group._get_backend(torch.device(kind)) for kind in ("cuda", "cpu"))
    assert on_gpu is not on_host
    leave_group(group)


def test_samples_come_from_the_engine_of_a_gpu(cuda: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron_rl.evaluation.sample import _values_of_model

    assert _values_of_model(tmp_path)["rollout"] == compose("rollout/vllm")
    assert compose("rollout/vllm") != compose("rollout/vllm_cpu")


def test_the_smallest_device_and_host_count(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.planning import at_start
    from megatron_rl.planning.phases import MemoryBudget

    card = SimpleNamespace(total_memory=80 * GIB)
    cuda.setattr(torch.cuda, "get_device_properties", lambda _: card)
    cuda.setattr(at_start, "available_gib", lambda: 512.0)
    world: Any = SimpleNamespace(local_size=8, all_gather=lambda mine: [mine, (79.0, 100.0)])
    assert at_start.smallest_budget(world) == MemoryBudget("cuda", 79.0, 64.0)


def test_no_remedy_for_a_cpu_is_installed(cuda: pytest.MonkeyPatch) -> None:
    """That the tracker without states changes no number: tests/numerics/test_fast_paths.py. Those
    of the delta net stand in for kernels of flash-linear-attention, wherever that is missing."""
    from megatron.core.tensor_parallel import random as megatron_random

    from megatron_rl.policy import patches
    from megatron_rl.policy.passes.linear_attention import STAND_INS

    cuda.setattr(patches, "this_machine", lambda: Machine((9, 0), None, "torch"))
    assert not patches._without_cuda()
    needed = {patch.name for patch in patches.PATCHES if patch.needed()}
    delta_net = {name for _, name, _ in STAND_INS}
    of_engine = {"_apply_rotary_pos_emb_thd", "Linear"}
    assert needed == of_engine | delta_net, "without Transformer Engine"
    # A new process, where no tracker has been made yet.
    cuda.setattr(patches, "PATCHES", ())
    cuda.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    cuda.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    patches.apply()
    tracker = megatron_random.get_cuda_rng_tracker()
    with tracker.fork(), tracker.fork(megatron_random.get_expert_parallel_rng_tracker_name()):
        pass
    assert not tracker.is_initialized(), "layers of Transformer Engine would take it"


def test_the_facts_of_a_gpu(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.policy import hardware

    cuda.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cuda.setattr(hardware, "transformer_engine_version", lambda: "2.20.2")
    hardware.this_machine.cache_clear()
    try:
        assert hardware.this_machine() == Machine((9, 0), "2.20.2", "transformer_engine")
    finally:
        hardware.this_machine.cache_clear()


def test_a_model_is_made_on_the_device(cuda: pytest.MonkeyPatch) -> None:
    """Its weights; experts keep their dispatcher; micro-batches of a pipeline have one length."""
    from megatron_rl.policy import model
    from tests.numerics.policy_cases import parallel
    from tests.unit.small_models import DENSE, EXPERTS, precision

    assert model.one_length()
    cuda.setattr(model, "this_machine", lambda: Machine((9, 0), None, "torch"))
    config = model.transformer_config(DENSE, parallel(pipeline=2), precision())
    assert not config.use_cpu_initialization and not config.variable_seq_lengths
    cut = parallel(tensor=2, sequence=True, expert_tensor=2, pipeline=2)
    config = model.transformer_config(EXPERTS, cut, precision())
    assert config.moe_token_dispatcher_type == "alltoall"


def test_chunks_go_to_the_device(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.policy import model
    from tests.unit.small_models import DENSE

    moved: list[int] = []
    chunk = SimpleNamespace(
        cuda=lambda index: moved.append(index) or chunk, modules=lambda: (), rotary_pos_emb=None
    )
    cuda.setattr(model, "HiddenStates", lambda **_: chunk)
    cuda.setattr(model, "block_spec", lambda *_, **__: None)
    for end in ("first", "last"):
        cuda.setattr(model.parallel_state, f"is_pipeline_{end}_stage", lambda **_: True)
    sizes = dict(virtual_pipeline_model_parallel_size=2, tensor_model_parallel_size=1)
    config: Any = SimpleNamespace(**sizes, bf16=False)
    settings: Any = SimpleNamespace(make_vocab_divisible_by=8)
    assert len(model.build_chunks(config, DENSE, None, settings, 64)) == 2 and moved == [3, 3]


def test_vllm_may_compile(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.engine.side_effects import prepare_import

    names = "TORCHDYNAMO_DISABLE VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL"
    for name in [*names.split(), "VLLM_NO_USAGE_STATS", "VLLM_BATCH_INVARIANT"]:
        cuda.setenv(name, "")  # noted, so that it is put back
        cuda.delenv(name)
    prepare_import(batch_invariant=False)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"
    prepare_import(batch_invariant=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_an_engine_has_a_share_of_the_gpu(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.engine.arguments import engine_arguments

    values = {**compose("rollout/vllm"), "stop": (), "gpu_memory_utilization": 0.4}
    found = engine_arguments("m", RolloutConfig(**values), 1)
    assert found["gpu_memory_utilization"] == 0.4
    assert not {"enable_chunked_prefill", "max_num_batched_tokens"} & set(found)


def test_staged_weights_are_in_pinned_memory(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.engine.weights.transfer_backend import StagedWeights

    make, asked = torch.zeros_like, []

    def zeros_like(form: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        asked.append((device, pin_memory))
        return make(form, device=device)

    cuda.setattr(torch, "zeros_like", zeros_like)
    parameters: Any = SimpleNamespace(forms={"a": torch.empty(2, device="meta")})
    staged = StagedWeights(parameters)
    staged.take(lambda parameter, written: parameter("a").fill_(3.0), 1)
    assert asked == [("cpu", True)] and staged.version == 1


def test_a_server_is_not_told_about_cpus(cuda: pytest.MonkeyPatch) -> None:
    from megatron_rl.engine.serving import server

    seen: dict[str, str] = {}
    cuda.setattr(server.subprocess, "Popen", lambda *_, env, **__: seen.update(env))
    server.start_server(["vllm"], {"HOME": "x"}, "secret", batch_invariant=True)
    assert seen["VLLM_BATCH_INVARIANT"] == "1"
    assert seen["VLLM_API_KEY"] == "secret" and seen["HOME"] == "x"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in seen and "TORCHDYNAMO_DISABLE" not in seen
