"""Every call of the engine is made in its stream; vLLM and the streams of CUDA are stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.engine import engine as engine_module
from megatron_rl.engine import request_tracking
from megatron_rl.engine.arguments import VLLM_QUANTIZATION, engine_arguments
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.types import Prompt, Sampling
from tests.unit.engine.streams_record import StreamRecord


class Llm:
    """Notes the current stream of each call. Building it changes the current stream, as a
    communicator does."""

    calls: list[tuple[str, str]]

    def __init__(self, **arguments: object) -> None:
        self.record = RECORDS[-1]
        self.calls = []
        scheduler_config = SimpleNamespace(max_num_seqs=8)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(scheduler_config=scheduler_config),
            step=self.step,
            abort_request=lambda names, internal: self.note(f"abort {names}"),
        )
        self.note("build")
        torch.cuda.set_stream(self.record.make())

    def note(self, what: str) -> None:
        self.calls.append((what, self.record.current))

    def enqueue(self, requests: list, params: list, use_tqdm: bool) -> list[str]:
        self.note("enqueue")
        return [f"{number}-a1b2" for number in range(len(requests))]

    def step(self) -> list:
        self.note("step")
        flat = SimpleNamespace(token_ids=[7], logprobs=[-0.5])
        output = SimpleNamespace(token_ids=[7], logprobs=flat, finish_reason="stop")
        return [SimpleNamespace(request_id="0", finished=True, outputs=[output])]

    def generate(self, requests: list, params: object, use_tqdm: bool) -> list:
        self.note("generate")
        scores = [None, {4: SimpleNamespace(logprob=-0.25)}]
        return [SimpleNamespace(prompt_logprobs=scores) for _ in requests]

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        if method == "receive_weights":
            list(args[0])
        self.note(method)
        return [["box"]]

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, level: int) -> None:
        self.note(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.note(f"wake {' '.join(tags)}")


RECORDS: list[StreamRecord] = []


def config(*overrides: str) -> Config:
    words = ["model.path=m", "data.train=t", "data.eval=e", *overrides]
    return validate(Config, compose("config", words), "test")


@pytest.fixture
def record(monkeypatch):
    RECORDS.append(StreamRecord(monkeypatch))
    world = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: 0, get_world_size=lambda: 1
    )
    for name, value in (
        ("dist", world),
        ("prepare_import", lambda **_: None),
        ("unlink_broadcast_buffer", lambda: None),
        ("expected_tensors", lambda path: {"a": (2,)}),
        ("eos_token_ids", lambda path: ()),
        ("answered_once", lambda **_: None),
        ("rotate_strided_parts", lambda: None),
    ):
        monkeypatch.setattr(engine_module, name, value)
    monkeypatch.setattr(request_tracking, "vllm_sampling", lambda *arguments: None)
    monkeypatch.setattr(engine_module.lazy_loading, "register_loader", lambda: None)
    monkeypatch.setattr(engine_module, "import_model_class", lambda path: None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Llm))
    yield RECORDS[-1]
    RECORDS.pop()


def test_calls_are_made_in_the_stream_of_the_engine(record):
    engine = VllmEngine("m", config().rollout, seed=1, launch_id="x")
    assert record.current == "policy"
    engine.generate([Prompt("p", (3,), "", "t")], Sampling(1, 4, seed=1))
    assert engine.score([[3, 4]]) == [[-0.25]]
    engine.weight_shards()
    engine.update_weights(lambda parameter, written: None, 1)
    engine.sleep()
    engine.wake(("weights",))
    engine.load_weights(iter([("a", torch.zeros(2, dtype=torch.bfloat16))]), 2)
    engine.wake(("kv_cache",))
    build, *calls = engine._llm.calls
    assert build == ("build", "engine")
    # The stream that the engine set while it was built: graphs and copies to the host are bound to
    # it.
    assert {stream for _, stream in calls} == {"other0"}, calls
    generation, update = ["enqueue", "step", "generate"], ["discover_shards", "receive_shards"]
    woken = ["wake weights", "zero_positions"]
    sleep = ["sleep 2", *woken, "receive_weights", "wake kv_cache"]
    assert [what for what, _ in calls] == [*generation, *update, *sleep]
    assert record.current == "policy"
    of_a_call = [("other0", "policy"), ("policy", "other0")]
    num_entered = len(calls) - 1  # positions are set in the call that wakes the weights
    assert record.waits == [("engine", "policy"), ("policy", "other0"), *of_a_call * num_entered]


def test_on_a_gpu_the_shared_memory_of_cpu_workers_is_not_asked_for(record, monkeypatch):
    def refuse(_: str) -> None:
        raise AssertionError("shared memory of vLLM's CPU worker")

    monkeypatch.setattr(engine_module, "private_segments", refuse)
    monkeypatch.setattr(engine_module.dist, "get_world_size", lambda: 2)
    VllmEngine("m", config("rollout.tensor=2").rollout, seed=1, launch_id="x")


def test_dropped_weights_have_no_version(record):
    """So the next hand-over sends them, whatever was sent before."""
    engine = VllmEngine("m", config().rollout, seed=1, launch_id="x")
    engine.update_weights(lambda parameter, written: None, 3)
    engine.sleep()
    assert engine.weight_version == -1
    engine.wake(("weights",))
    assert engine.weight_version == -1
    engine.update_weights(lambda parameter, written: None, 3)
    assert engine.weight_version == 3


def test_an_engine_that_woke_in_part_sleeps_again(record):
    """A hand-over that fails between the two parts gives all memory back to the policy."""
    engine = VllmEngine("m", config("rollout.sleep_level=1").rollout, seed=1, launch_id="x")
    engine.sleep()
    engine.wake(("weights",))
    engine.sleep()
    engine.sleep()
    assert [what for what, _ in engine._llm.calls[1:]] == ["sleep 1", "wake weights", "sleep 1"]
    engine.wake()
    assert engine._llm.calls[-1][0] == "wake weights kv_cache"


def test_arguments_say_what_the_configuration_says(record):
    """``fp8`` under vLLM's present name; the number of sequences is vLLM's choice where none is
    given."""
    plain = engine_arguments("m", config().rollout, 1)
    assert plain["quantization"] is None
    assert plain["enable_sleep_mode"]
    assert "max_num_seqs" not in plain
    words = ("rollout.quantization=fp8", "rollout.max_num_seqs=9", "method.mismatch.kind=tis")
    chosen = engine_arguments("m", config(*words).rollout, 1)
    assert (chosen["quantization"], chosen["max_num_seqs"]) == ("fp8_per_tensor", 9)


def test_a_cpu_engine_takes_what_it_always_took(record):
    arguments = engine_arguments("m", config("rollout=vllm_cpu").rollout, 1)
    assert (arguments["max_num_seqs"], arguments["enable_sleep_mode"]) == (256, False)


def test_vllm_knows_that_name_of_the_quantization():
    from vllm.config.quantization import resolve_quantization_config

    name = VLLM_QUANTIZATION["fp8"]
    arguments = resolve_quantization_config(name, None)
    assert arguments is not None
    assert arguments.linear.weight.dtype == torch.float8_e4m3fn
