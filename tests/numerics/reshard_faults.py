"""What goes wrong in a planned sync is refused with names, and no engine goes on with half of the
weights."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.weights import worker
from megatron_rl.engine.weights.recorder import record_shards
from megatron_rl.errors import WeightSyncError
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import WeightSync
from megatron_rl.trainer.build import build_sync
from megatron_rl.types import Shard
from megatron_rl.weight_sync import transport
from megatron_rl.weight_sync.gather import GatherSync
from tests.numerics import rollout_models as small
from tests.numerics.reshard_parts import (
    GREEDY,
    OTHER,
    PROMPTS,
    START,
    WORLD,
    answers,
    engine_of,
    path_of,
    planned,
    policy_of,
)


def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """On every rank, with one message."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert len({str(one) for one in WORLD.all_gather(str(error))}) == 1, (
            "the ranks say different things"
        )
    else:
        raise AssertionError(f"no {kind.__name__}")


class Tampered:
    """A policy of which rank 1 passes on other shards, or other weights."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self.shard: Callable[[Shard], Shard | None] = lambda shard: shard
        self.value: Callable[[str, Tensor], Tensor] = lambda key, tensor: tensor

    def weight_shards(self) -> list[Shard]:
        shards = self.policy.weight_shards()
        if WORLD.rank != 1:
            return shards
        changed = [self.shard(shard) for shard in shards]
        return [shard for shard in changed if shard is not None]

    def wait_for_param_gather(self) -> None:
        self.policy.wait_for_param_gather()

    def weight(self, key: str) -> Tensor:
        tensor = self.policy.weight(key)
        return self.value(key, tensor) if WORLD.rank == 1 else tensor


TARGET = "model.layers.1.mlp.up_proj.weight"  # on rank 1 of two pipeline stages
KEY = "0:decoder.layers.0.mlp.linear_fc1.weight"
CHANGES: dict[str, tuple[Callable[[Shard], Shard | None], tuple[str, ...]]] = {
    "missing": (lambda shard: None, (TARGET, "[0:160, 0:128]")),
    "dtype": (lambda shard: replace(shard, dtype="bfloat16"), (TARGET, "bfloat16", "float32")),
    "shape": (lambda shard: replace(shard, full=(176, 128)), (TARGET, "176", "160")),
}


def misfits_are_refused_before_anything_moves() -> None:
    """In the shards: no plan is made. In the weights: no byte is sent. The old weights serve on,
    under their old version."""
    engine, policy = engine_of("qwen3", 1), Tampered(policy_of("qwen3", {"pipeline": 2}))
    planned(policy, engine).sync(10)
    before = answers(engine)
    for change, words in CHANGES.values():
        policy.shard = lambda shard, change=change: change(shard) if shard.name == TARGET else shard
        refused(lambda: planned(policy, engine), ValueError, *words)
    policy.shard = lambda shard: shard
    sync = planned(policy, engine)
    sync.sync(11)
    for word, change in {
        "bfloat16": Tensor.bfloat16,
        "(1, 128)": lambda x: x[:1],
        "first seen": lambda x: torch.cat([x, x]),
    }.items():
        policy.value = lambda key, tensor, change=change: change(tensor) if key == KEY else tensor
        refused(lambda: sync.sync(12), ValueError, "rank 1", KEY, word)
    assert answers(engine) == (*before[:2], {11}), "whatever was refused left the engine as it was"
    policy.policy.close()


def unusable(engine: VllmEngine, *words: str) -> None:
    for attempt in (
        lambda: engine.generate(PROMPTS, GREEDY),
        lambda: engine.update_weights(lambda parameter, written: None, 9),
    ):
        try:
            attempt()
        except RuntimeError as error:
            assert all(word in str(error) for word in ("half replaced", *words)), error
        else:
            raise AssertionError("the engine goes on with weights that are neither old nor new")


def changed_byte_is_named_and_the_engine_refuses() -> None:
    engine, policy = engine_of("llama", 1), policy_of("llama", {"pipeline": 2})
    sync, packed = planned(policy, engine), transport._TransportRun.packed
    if WORLD.rank == 1:
        transport._TransportRun.packed = lambda run, message, buffer: (
            packed(run, message, buffer),
            buffer.bitwise_xor_(1),
        )
    try:
        refused(
            lambda: sync.sync(5),
            WeightSyncError,
            "other bytes arrived than were sent",
            "from rank 1 to rank 0: lm_head.weight[",
        )
    finally:
        transport._TransportRun.packed = packed
        policy.close()
    unusable(engine, "the update to weight version 5 failed", "from rank 1 to rank 0")


def rank_raises_in_the_middle() -> None:
    """And its process stays: both ranks raise the same error as soon as the messages are through,
    and neither engine goes on."""
    engine, policy = engine_of("mixtral", 1), Tampered(policy_of("mixtral", {"tensor": 2}))
    sync, served = planned(policy, engine), []

    def fail(key: str, tensor: Tensor) -> Tensor:
        served.append(key)
        if (
            len(served) > len(sync._transport.program.sources) + 4
        ):  # all of them are checked before anything moves
            raise OSError("the disk is gone")
        return tensor

    policy.value = fail
    refused(
        lambda: sync.sync(6), WeightSyncError, "rank 1: OSError: the disk is gone", "half updated"
    )
    unusable(engine, "the update to weight version 6 failed", "rank 1: OSError")
    policy.policy.close()


def incomplete_transfer_is_refused() -> None:
    """One parameter is never written."""
    engine = engine_of("qwen2_tied", 1)
    keys = sorted({shard.key for shard in engine.weight_shards()})[1:]

    def all_but_one(parameter: Callable[[str], Tensor], written: Callable[[str], None]) -> None:
        for key in keys:
            parameter(key).zero_()
            written(key)

    try:
        engine.update_weights(all_but_one, 6)
    except AssertionError as error:
        assert "never completed" in str(error), error
    unusable(engine, "version 6", "never completed")


def rank_dies_in_the_middle() -> None:
    """The last case: rank 1 is gone afterwards. The survivor names it, and its engine serves
    neither old nor half of the new weights."""
    engine, policy = engine_of("qwen3", 1), Tampered(policy_of("qwen3", {"pipeline": 2}))
    sync, served = planned(policy, engine), []

    def die(key: str, tensor: Tensor) -> Tensor:
        served.append(key)
        if len(served) > 8:
            small.say("OK rank_dies_in_the_middle")
            os._exit(0)
        return tensor

    # The check asks for every weight, so rank 1 would die before anything moves.
    transport.Transport.check_sources = lambda *args: None
    policy.value = die
    assert answers(engine)[2] == {11}
    try:
        sync.sync(12)
    except WeightSyncError as error:
        assert all(word in str(error) for word in ("rank 1", "round", "model.", "half updated")), (
            error
        )
    else:
        raise AssertionError("nobody missed the dead rank")
    unusable(engine, "the update to weight version 12 failed", "rank 1")
    assert engine.weight_version == 11


def a_loader_that_computes_means_gather() -> None:
    """vLLM's loader cannot be recorded: ``auto`` is gather then, and reshard is refused."""
    engine, policy = engine_of("qwen3_moe", 1), policy_of("qwen3_moe", {"expert": 2})
    paths = ["model.path=-", "data.train=-", "data.eval=-", "precision=fp32", "rollout=vllm_cpu"]

    def build(*overrides: str) -> WeightSync:
        config = validate(Config, compose("config", [*paths, *overrides]), "test")
        return build_sync(config, policy, engine, WORLD)

    receiver = engine._llm.collective_rpc(lambda each: each.shard_receiver)[0]
    recorded, receiver.shards = receiver.shards, []
    record, worker.record_shards = worker.record_shards, computing
    try:
        assert isinstance(build(), GatherSync)
        words = ("weight_sync.method=gather", "computes what it copies")
        refused(lambda: build("weight_sync.method=reshard"), ValueError, *words)
    finally:
        receiver.shards, worker.record_shards = recorded, record
    policy.close()


def biases_that_a_kernel_widened_take_part() -> None:
    """Where a processor has tiles for bfloat16, vLLM keeps the biases of small layers in float32:
    they are loaded as bfloat16 all the same, and are widened again afterwards."""
    config = small.engine_config(dtype="bfloat16")
    old, new = (
        VllmEngine(str(path_of("qwen2_tied", seed)), config, seed=0, launch_id=WORLD.launch_id)
        for seed in (START, OTHER)
    )
    want, before = answers(new), answers(old)
    shards = old.weight_shards()
    assert answers(old) == before, "looking for the shards changed the weights"
    assert any(shard.key.endswith("bias") for shard in shards)
    assert {shard.dtype for shard in shards} == {"bfloat16"}
    policy = policy_of("qwen2_tied", {"pipeline": 2}, params="bfloat16")
    planned(policy, old).sync(13)
    assert answers(old)[:2] == want[:2]
    policy.close()


def computing(load, shapes, parameters, dtype):
    return record_shards(
        lambda weights: load((name, tensor + 1) for name, tensor in weights),
        shapes,
        parameters,
        dtype,
    )
