"""What the engine does where there is a CUDA device (see test_cuda_answers)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.cuda_checks import Patch, asked_at, rollout


@asked_at("engine.arguments:engine_arguments")
def a_share_of_the_gpu_and_sleep(_: Patch, __: Any) -> None:
    from megatron_rl.engine.arguments import engine_arguments

    found = engine_arguments("m", rollout(gpu_memory_utilization=0.4, sleep_level=2), 1)
    assert (found["gpu_memory_utilization"], found["enable_sleep_mode"]) == (0.4, True)
    assert not {"enable_chunked_prefill", "max_num_batched_tokens"} & set(found)
    assert not engine_arguments("m", rollout(sleep_level=0), 1)["enable_sleep_mode"]


@asked_at("engine.side_effects:prepare_import")
def vllm_may_compile(patch: Patch, _: Any) -> None:
    import os

    from megatron_rl.engine.side_effects import prepare_import

    names = (
        "TORCHDYNAMO_DISABLE",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
    )
    for name in names:
        patch.setenv(name, "")  # noted, so that it is put back
        patch.delenv(name)
    prepare_import()
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@asked_at("engine.engine:VllmEngine._build")
@asked_at("engine.engine:VllmEngine.__init__")
def the_engine_can_sleep(patch: Patch, folder: Any) -> None:
    from megatron_rl.engine import engine

    class Llm:
        def __init__(self, **arguments: Any) -> None:
            self.arguments, self.slept = arguments, []
            scheduler = SimpleNamespace(max_num_seqs=8)
            self.llm_engine = SimpleNamespace(
                vllm_config=SimpleNamespace(scheduler_config=scheduler)
            )

        def sleep(self, level: int) -> None:
            self.slept.append(level)

    def refuse(_: str) -> None:
        raise AssertionError("shared memory of vLLM's CPU worker")

    (folder / "config.json").write_text("{}")
    vllm = ModuleType("vllm")
    vllm.LLM = Llm
    patch.setitem(sys.modules, "vllm", vllm)
    patch.setattr(dist, "is_initialized", lambda: True)
    patch.setattr(dist, "get_rank", lambda: 2)
    patch.setattr(dist, "get_world_size", lambda: 4)
    patch.setattr(engine.lazy_loading, "register_loader", lambda: None)
    patch.setattr(engine, "expected_tensors", lambda _: {})
    patch.setattr(engine, "EngineStream", lambda: SimpleNamespace(entered=nullcontext))
    patch.setattr(engine, "private_segments", refuse)
    patch.setattr(engine, "unlink_broadcast_buffer", lambda: None)
    patch.setattr(engine, "_ALIVE", [])
    built = engine.VllmEngine(str(folder), rollout(tensor=2, sleep_level=2), seed=5, launch_id="x")
    assert built._llm.arguments["enable_sleep_mode"] and built.replica == 1
    built.sleep()
    assert built._llm.slept == [2] and built.weight_version == -1


@asked_at("engine.weights.staging:StagedWeights._parameter")
def staged_weights_are_in_pinned_memory(patch: Patch, _: Any) -> None:
    from megatron_rl.engine.weights.staging import StagedWeights

    make, asked = torch.zeros_like, []

    def zeros_like(form: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        asked.append((device, pin_memory))
        return make(form, device=device)

    patch.setattr(torch, "zeros_like", zeros_like)
    staged = StagedWeights(SimpleNamespace(forms={"a": torch.empty(2, device="meta")}))
    staged.take(lambda parameter, written: parameter("a").fill_(3.0), 1)
    assert asked == [("cpu", True)] and staged.version == 1


@asked_at("engine.serving.server:start_server")
def a_server_is_not_told_about_cpus(patch: Patch, _: Any) -> None:
    from megatron_rl.engine.serving import server

    seen: dict[str, str] = {}
    patch.setattr(server.subprocess, "Popen", lambda *_, env, **__: seen.update(env))
    server.start_server(["vllm"], {"HOME": "x"}, "secret")
    assert seen["VLLM_API_KEY"] == "secret" and seen["HOME"] == "x"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in seen and "TORCHDYNAMO_DISABLE" not in seen


@asked_at("engine.requirements:check_start")
def segments_that_cannot_be_shared_are_refused(patch: Patch, _: Any) -> None:
    from megatron_rl.engine.requirements import check_start

    patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    check_start(rollout(tensor=1))
    with pytest.raises(ValueError, match="expandable"):
        check_start(rollout(tensor=2))


@asked_at("engine.streams:EngineStream.__init__")
def the_engine_works_in_a_stream_of_its_own(patch: Patch, _: Any) -> None:
    from megatron_rl.engine.streams import EngineStream

    class Stream:
        def __init__(self) -> None:
            self.waited: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited.append(other)

    caller = Stream()
    current = [caller]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    engine = EngineStream()
    with engine.entered():
        inside = current[-1]
        assert inside is not caller and inside.waited == [caller] and not caller.waited
    assert current == [caller] and caller.waited == [inside]
