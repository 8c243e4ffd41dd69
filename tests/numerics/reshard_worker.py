"""Megatron policy and vLLM on every rank: the planned sync leaves every worker with the bits that the gathered one leaves, and sends
no byte more than is wanted elsewhere.

Usage: ``reshard_worker.py FOLDER CASE...``, a case being ``<arch>:<train layout>:<rollout tensor>``, for example
``qwen3:tensor=2,pipeline=2:1``, or the name of a fault.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from megatron_rl.config.schema import ModelConfig
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollout import worker
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.rollout.recorder import record_boxes
from megatron_rl.runtime import launch
from megatron_rl.runtime.digest import WeightSyncError
from megatron_rl.trainer.sync import find_boxes
from megatron_rl.types import Box
from megatron_rl.weight_sync import transport
from megatron_rl.weight_sync.boxes import expand
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes
from megatron_rl.weight_sync.reshard import ReshardSync
from tests.numerics import policy_cases
from tests.numerics import rollout_models as small

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
PROMPTS = small.make_prompts(4)
GREEDY = small.sampling(temperature=0.0, num_responses=1, max_response_tokens=16)
OTHER, START = 2, 1  # seeds: what the policy holds, what the engines start with
SHORT = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "expert_tensor": "etp"}


@cache
def path_of(arch: str, seed: int) -> Path:
    path = FOLDER / f"{arch}_{seed}"
    if WORLD.rank == 0 and not path.exists():
        small.write(arch, seed, FOLDER)
    WORLD.barrier()
    return path


@cache
def engine_of(arch: str, tensor: int) -> VllmEngine:
    path = path_of(arch, START)
    _ROPE_DICT.clear()  # engines of one process share rotary tables; a failed update leaves them without data
    return VllmEngine(str(path), small.engine_config(tensor=tensor), seed=0, launch_id=WORLD.launch_id)


def policy_of(arch: str, layout: dict, seed: int = OTHER, params: str = "float32") -> MegatronPolicy:
    more = {"sequence": True} if "tensor" in layout and arch in ("qwen3_moe", "mixtral") else {}
    return MegatronPolicy(
        ModelConfig(path=str(path_of(arch, seed)), make_vocab_divisible_by=64),
        policy_cases.parallel(**layout, **more),
        policy_cases.precision(params),
        policy_cases.optim(),
        temperature=1.0,
        keep_reference=False,
        total_optimizer_steps=1,
        max_sequence_tokens=512,
    )


class Loaded:
    """The parameters of a worker as they are when a layer's loading is over, before vLLM packs them away."""

    def __init__(self, engine: VllmEngine) -> None:
        self.values: dict[str, Tensor] = {}
        self.model = engine._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading = partial(self.process, name, method.process_weights_after_loading)

    def process(self, name: str, original, layer: torch.nn.Module) -> None:
        self.keep(name, layer)
        original(layer)

    def keep(self, name: str, layer: torch.nn.Module) -> None:
        self.values |= {f"{name}.{key}": value.detach().clone() for key, value in layer._parameters.items() if value is not None}

    def take(self) -> dict[str, Tensor]:
        """What was loaded since the last call; parameters that are never processed as they are now."""
        before, self.values = self.values, {}
        for name, module in self.model.named_modules():
            self.keep(name, module)
        return self.values | before | (self.reset() or {})

    def reset(self) -> None:
        self.values = {}


loaded_of = cache(Loaded)


def answers(engine: VllmEngine) -> tuple:
    groups = engine.generate(PROMPTS, GREEDY)
    return small.tokens(groups), small.logprobs(groups).tolist(), {one.weight_version for group in groups for one in group}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    return all(torch.equal(value, two[name]) for name, value in one.items())


def masks(boxes: list[Box]) -> dict[str, np.ndarray]:
    """Which elements of each tensor are in a box."""
    found: dict[str, np.ndarray] = {}
    for box in boxes:
        mask = found.setdefault(box.tensor, np.zeros(box.full, dtype=bool))
        mask[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = True
    return found


def bytes_missing(held: list[Box], wanted: list[Box]) -> int:
    """Counted element by element: what this rank wants and does not hold, in bytes of float32."""
    have = masks(held)
    return 4 * sum(int((mask & ~have[name]).sum() if name in have else mask.sum()) for name, mask in masks(wanted).items())


def check_boxes(policy: MegatronPolicy, engine: VllmEngine, arch: str, layout: dict, tensor: int) -> tuple[list[Box], list[Box]]:
    """Live boxes are those of the declared tables, and hold what the gathered weights hold."""
    config = json.loads((path_of(arch, OTHER) / "config.json").read_text())
    shape, ranks = ModelShape.from_hf(config, "float32"), math.prod(layout[k] for k in ("tensor", "pipeline", "context") if k in layout)
    train = TrainLayout(**{SHORT[key]: value for key, value in layout.items()}, dp=WORLD.size // ranks, vocab_multiple=64)
    rollout = RolloutLayout(tp=tensor, dp=WORLD.size // tensor)
    held, wanted = policy.weight_boxes(), engine.weight_boxes()
    for live, table in ((held, train_boxes(shape, train, WORLD.rank)), (wanted, rollout_boxes(shape, rollout, WORLD.rank))):
        declared = {(one.tensor, one.full, one.dtype, one.start, one.shape, one.key, one.offset) for one in expand(table)}
        assert declared == {(one.tensor, one.full, one.dtype, one.start, one.shape, one.key, one.offset) for one in live}
    whole = dict(policy.gathered_weights())
    for box in held:
        part = whole[box.tensor][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        parameter = policy.weight(box.key).detach()
        assert torch.equal(parameter.as_strided(box.shape, box.stride, parameter.storage_offset() + box.offset), part), box
    return held, wanted


def compare(policy: MegatronPolicy, engine: VllmEngine, loaded: Loaded, boxes: tuple[list[Box], list[Box]], start: Path) -> None:
    GatherSync(policy, engine, verify=True).sync(1)
    gathered, want = loaded.take(), answers(engine)
    engine.load_weights(iter(load_file(start / "model.safetensors").items()), 2)
    assert not equal(loaded.take(), gathered) and answers(engine)[:2] != want[:2], "the two models differ"
    sync = planned(policy, engine)
    for version in (3, 4):  # the second sync uses the same plan
        report = sync.sync(version)
        assert equal(loaded.take(), gathered)
        assert answers(engine) == (*want[:2], {version})
    missing, sent = (sum(WORLD.all_gather(value)) for value in (bytes_missing(*boxes), report.bytes_sent))
    assert sent == missing == sync.plan.bytes_sent == sync.plan.lower_bound
    assert report.bytes_total == 4 * sum(int(mask.sum()) for mask in masks(boxes[1]).values())
    assert report.num_tensors == len(masks(boxes[1]))


def planned_equals_gathered(arch: str, layout: dict, tensor: int) -> None:
    engine = engine_of(arch, tensor)
    loaded, policy = loaded_of(engine), policy_of(arch, layout)
    try:
        compare(policy, engine, loaded, check_boxes(policy, engine, arch, layout, tensor), path_of(arch, START))
    finally:
        policy.close()


def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """On every rank, with one message."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert len({str(one) for one in WORLD.all_gather(str(error))}) == 1, "the ranks say different things"
    else:
        raise AssertionError(f"no {kind.__name__}")


class Tampered:
    """A policy of which rank 1 passes on other boxes, or other weights."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self.box: Callable[[Box], Box | None] = lambda box: box
        self.value: Callable[[str, Tensor], Tensor] = lambda key, tensor: tensor

    def weight_boxes(self) -> list[Box]:
        boxes = self.policy.weight_boxes()
        return [new for box in boxes if (new := self.box(box)) is not None] if WORLD.rank == 1 else boxes

    def settle(self) -> None:
        self.policy.settle()

    def weight(self, key: str) -> Tensor:
        tensor = self.policy.weight(key)
        return self.value(key, tensor) if WORLD.rank == 1 else tensor


def planned(policy: MegatronPolicy | Tampered, engine: VllmEngine) -> ReshardSync:
    return ReshardSync(policy, engine, gpus_per_node=WORLD.size, bucket_mib=1, verify=True)


TARGET = "model.layers.1.mlp.up_proj.weight"  # on rank 1 of two pipeline stages
KEY = "0:decoder.layers.0.mlp.linear_fc1.weight"
CHANGES: dict[str, tuple[Callable[[Box], Box | None], tuple[str, ...]]] = {
    "missing": (lambda box: None, (TARGET, "[0:160, 0:128]")),
    "dtype": (lambda box: replace(box, dtype="bfloat16"), (TARGET, "bfloat16", "float32")),
    "shape": (lambda box: replace(box, full=(176, 128)), (TARGET, "176", "160")),
}


def misfits_are_refused_before_anything_moves() -> None:
    """In the boxes: no plan is made. In the weights: no byte is sent. The old weights serve on, under their old version."""
    engine, policy = engine_of("qwen3", 1), Tampered(policy_of("qwen3", {"pipeline": 2}))
    planned(policy, engine).sync(10)
    before = answers(engine)
    for change, words in CHANGES.values():
        policy.box = lambda box, change=change: change(box) if box.tensor == TARGET else box
        refused(lambda: planned(policy, engine), ValueError, *words)
    policy.box = lambda box: box
    sync = planned(policy, engine)
    sync.sync(11)
    for word, change in {"bfloat16": Tensor.bfloat16, "(1, 128)": lambda x: x[:1], "first seen": lambda x: torch.cat([x, x])}.items():
        policy.value = lambda key, tensor, change=change: change(tensor) if key == KEY else tensor
        refused(lambda: sync.sync(12), ValueError, "rank 1", KEY, word)
    assert answers(engine) == (*before[:2], {11}), "whatever was refused left the engine as it was"
    policy.policy.close()


def unusable(engine: VllmEngine, *words: str) -> None:
    for attempt in (lambda: engine.generate(PROMPTS, GREEDY), lambda: engine.update_weights(lambda parameter, written: None, 9)):
        try:
            attempt()
        except RuntimeError as error:
            assert all(word in str(error) for word in ("half replaced", *words)), error
        else:
            raise AssertionError("the engine goes on with weights that are neither old nor new")


def changed_byte_is_named_and_the_engine_refuses() -> None:
    engine, policy = engine_of("llama", 1), policy_of("llama", {"pipeline": 2})
    sync, packed = planned(policy, engine), transport._Run.packed
    if WORLD.rank == 1:
        transport._Run.packed = lambda run, message, buffer: (packed(run, message, buffer), buffer.bitwise_xor_(1))
    try:
        refused(lambda: sync.sync(5), WeightSyncError, "other bytes arrived than were sent", "from rank 1 to rank 0: model.")
    finally:
        transport._Run.packed = packed
        policy.close()
    unusable(engine, "the update to weight version 5 failed", "from rank 1 to rank 0")


def rank_raises_in_the_middle() -> None:
    """And its process stays: both ranks raise the same error as soon as the messages are through, and neither engine goes on."""
    engine, policy = engine_of("mixtral", 1), Tampered(policy_of("mixtral", {"tensor": 2}))
    sync, served = planned(policy, engine), []

    def fail(key: str, tensor: Tensor) -> Tensor:
        served.append(key)
        if len(served) > len(sync._transport.program.sources) + 4:  # all of them are checked before anything moves
            raise OSError("the disk is gone")
        return tensor

    policy.value = fail
    refused(lambda: sync.sync(6), WeightSyncError, "rank 1: OSError: the disk is gone", "half updated")
    unusable(engine, "the update to weight version 6 failed", "rank 1: OSError")
    policy.policy.close()


def incomplete_transfer_is_refused() -> None:
    """One parameter is never written."""
    engine = engine_of("qwen2_tied", 1)
    keys = sorted({box.key for box in engine.weight_boxes()})[1:]

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
    """The last case: rank 1 is gone afterwards. The survivor names it, and its engine serves neither old nor half of the new weights."""
    engine, policy = engine_of("qwen3", 1), Tampered(policy_of("qwen3", {"pipeline": 2}))
    sync, served = planned(policy, engine), []

    def die(key: str, tensor: Tensor) -> Tensor:
        served.append(key)
        if len(served) > 8:
            small.say("OK rank_dies_in_the_middle")
            os._exit(0)
        return tensor

    transport.Transport.check_sources = lambda *args: None  # it would ask for every weight, and die before anything moves
    policy.value = die
    assert answers(engine)[2] == {11}
    try:
        sync.sync(12)
    except WeightSyncError as error:
        assert all(word in str(error) for word in ("rank 1", "round", "model.", "half updated")), error
    else:
        raise AssertionError("nobody missed the dead rank")
    unusable(engine, "the update to weight version 12 failed", "rank 1")
    assert engine.weight_version == 11


def declared_boxes_serve_where_nothing_was_recorded() -> None:
    """A loader that computes: the declared table takes its place, and the result is the same."""
    engine, policy = engine_of("qwen3_moe", 1), policy_of("qwen3_moe", {"expert": 2})
    planned(policy, engine).sync(7)
    want, (engine._boxes, boxes) = answers(engine)[:2], (None, engine._boxes)
    record, worker.record_boxes = worker.record_boxes, computing
    try:
        origin = find_boxes(engine, str(path_of("qwen3_moe", OTHER)), "float32", RolloutLayout(1, WORLD.size), WORLD.rank)
    finally:
        worker.record_boxes = record
    assert origin.startswith("declared (") and engine._boxes != boxes
    engine.load_weights(iter(load_file(path_of("qwen3_moe", START) / "model.safetensors").items()), 8)
    planned(policy, engine).sync(9)
    assert answers(engine) == (*want, {9})
    policy.close()


def biases_that_a_kernel_widened_take_part() -> None:
    """Where a processor has tiles for bfloat16, vLLM keeps the biases of small layers in float32: they are loaded as bfloat16 all
    the same, and are widened again afterwards."""
    config = small.engine_config(dtype="bfloat16")
    old, new = (VllmEngine(str(path_of("qwen2_tied", seed)), config, seed=0, launch_id=WORLD.launch_id) for seed in (START, OTHER))
    want, before = answers(new), answers(old)
    boxes = old.weight_boxes()
    assert answers(old) == before, "looking for the boxes changed the weights"
    assert any(box.key.endswith("bias") for box in boxes)
    assert {box.dtype for box in boxes} == {"bfloat16"}
    policy = policy_of("qwen2_tied", {"pipeline": 2}, params="bfloat16")
    planned(policy, old).sync(13)
    assert answers(old)[:2] == want[:2]
    policy.close()


def computing(load, shapes, parameters, dtype):
    return record_boxes(lambda weights: load((name, tensor + 1) for name, tensor in weights), shapes, parameters, dtype)


def parse(case: str) -> tuple[str, dict, int]:
    arch, layout, tensor = case.split(":")
    return arch, {key: int(value) for key, value in (item.split("=") for item in layout.split(",") if item)}, int(tensor)


if __name__ == "__main__":
    cases: dict[str, Callable[[], None]] = {}
    for name in sys.argv[2:]:
        cases[name] = partial(planned_equals_gathered, *parse(name)) if ":" in name else globals()[name]
    small.run_cases(cases)
