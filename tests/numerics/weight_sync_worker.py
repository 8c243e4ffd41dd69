"""One process: a weight update of the engine, against an engine started on the new weights, and
everything that may go wrong."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.weights import worker
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.errors import WeightSyncError
from megatron_rl.protocols import RolloutEngine
from megatron_rl.runtime import launch
from megatron_rl.weight_sync.gather import GatherSync
from tests.numerics import rollout_models as small

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
GREEDY = {"temperature": 0.0, "num_responses": 1, "max_response_tokens": 32}


class HfPolicy:
    """The sending half of a policy: the tensors of a HF checkpoint."""

    gathered_bytes_sent = 0

    def __init__(self, path: Path) -> None:
        self.path = path

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors.torch import load_file

        yield from load_file(self.path / "model.safetensors").items()


class Tampering:
    """An engine that receives its weights through ``change``."""

    def __init__(
        self, engine: RolloutEngine, change: Callable[[str, Tensor], tuple[str, Tensor] | None]
    ) -> None:
        self.engine, self.change = engine, change

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, confirm):
        changed = (self.change(name, tensor) for name, tensor in weights)
        return self.engine.load_weights(
            (item for item in changed if item is not None), version, confirm
        )


@cache
def path_of(arch: str, seed: int) -> Path:
    return small.write(arch, seed, FOLDER)


def start(arch: str, seed: int, **more: Any) -> VllmEngine:
    # engines of one process share rotary tables; a failed update leaves them without data
    _ROPE_DICT.clear()
    return VllmEngine(
        str(path_of(arch, seed)),
        small.engine_config(arch),
        seed=0,
        launch_id=WORLD.launch_id,
        **more,
    )


fresh = cache(start)  # engines that are never updated


def update(engine: RolloutEngine, arch: str, seed: int, version: int = 1):
    return GatherSync(HfPolicy(path_of(arch, seed)), engine, verify=True).sync(version)


def gap_to_fresh(engine: VllmEngine, arch: str, seed: int) -> float:
    """Largest distance of greedy logprobs from those of an engine started on the weights; infinite
    when a token differs."""
    prompts = small.make_prompts(8)
    one, two = (
        small_engine.generate(prompts, small.sampling(**GREEDY))
        for small_engine in (engine, fresh(arch, seed))
    )
    if small.tokens(one) != small.tokens(two):
        return float("inf")
    return (small.logprobs(one) - small.logprobs(two)).abs().max().item()


def updated_equals_fresh(arch: str) -> None:
    engine, prompts = start(arch, 1), small.make_prompts(8)
    assert gap_to_fresh(engine, arch, 2) > 0.1, "the two models differ"
    for version, seed in ((1, 2), (2, 1), (3, 2)):
        report = update(engine, arch, seed, version)
        assert gap_to_fresh(engine, arch, seed) == 0.0
    groups = engine.generate(prompts, small.sampling())
    bound = 1.0 if small.number_format(arch) == "bfloat16" else 1e-4
    if arch not in small.BY_TRANSFORMERS:
        assert small.logprob_gap(small.build(arch, 2), prompts, groups, lambda x: x) <= bound
    assert (
        {completion.weight_version for group in groups for completion in group}
        == {3}
        == {report.version}
    )
    files = [tensor for _, tensor in HfPolicy(path_of(arch, 2)).gathered_weights()]
    assert (report.num_tensors, report.bytes_total) == (
        len(files),
        4 * sum(tensor.numel() for tensor in files),
    )


def no_group_has_a_limit() -> None:
    """vLLM's groups: the longest response may take longer than 30 minutes."""
    fresh("qwen3", 1)
    groups = dist.distributed_c10d._world.pg_map
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    assert len(groups) > 3 and limits == {launch.NO_LIMIT}, limits


def filled_by_first_sync(arch: str) -> None:
    """An engine that reads no file of the weights answers, after its first sync, bit for bit as one
    that has read them; before, it refuses."""
    tensors = expected_tensors(path_of(arch, 1))
    with reads() as before:
        engine = start(arch, 1, expected=tensors)
    assert not before, f"weights were read: {before}"
    for version, seed in ((1, 1), (2, 2)):
        with contextlib.suppress(RuntimeError):
            engine.generate(small.make_prompts(1), small.sampling(**GREEDY))
            assert version > 1, "it answered without weights"
        update(engine, arch, seed, version)
        assert gap_to_fresh(engine, arch, seed) == 0.0
    with reads() as again:
        start(arch, 1)
    assert again, "the files of an engine without the promise are read"


def unreached_reads_files(arch: str) -> None:
    """A weight that no awaited tensor is loaded into is known by name; then the files are read."""
    tensors = dict(expected_tensors(path_of(arch, 1)))
    del tensors["model.layers.1.input_layernorm.weight"]
    with collected_logs() as lines:
        engine = start(arch, 1, expected=tensors)
    assert any("model.layers.1.input_layernorm.weight" in line for line in lines), lines
    assert gap_to_fresh(engine, arch, 1) == 0.0


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """The files whose tensors vLLM opens meanwhile."""
    from vllm.model_executor.model_loader import weight_utils

    opened: list[str] = []
    real = weight_utils.safe_open

    def noting(name: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(name)
        return real(name, *args, **kwargs)

    weight_utils.safe_open = noting
    try:
        yield opened
    finally:
        weight_utils.safe_open = real


@contextlib.contextmanager
def collected_logs() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_rl.engine")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def unpacked_is_wrong(arch: str) -> None:
    """Without the repacking, the update succeeds and the numbers are wrong."""
    repack, worker.repack_cpu = worker.repack_cpu, lambda model: None
    try:
        engine = start(arch, 1)
        update(engine, arch, 2)
        assert gap_to_fresh(engine, arch, 2) > 0.1
    finally:
        worker.repack_cpu = repack


def prefix_cache() -> None:
    """A prompt longer than a block of the cache, seen before the update."""
    prompt = small.make_prompts(1, length=261)
    want = fresh("qwen3", 2).generate(prompt, small.sampling(**GREEDY))
    for reset in (True, False):
        engine = start("qwen3", 1)
        engine.generate(prompt, small.sampling(**GREEDY))
        if not reset:
            engine._llm.reset_prefix_cache = lambda: True
        update(engine, "qwen3", 2)
        got = engine.generate(prompt, small.sampling(**GREEDY))
        same = small.tokens(got) == small.tokens(want) and torch.equal(
            small.logprobs(got), small.logprobs(want)
        )
        assert same == reset, "stale keys and values change the answer, unless the cache is dropped"


def bf16_engine_takes_float32() -> None:
    """The loader rounds once: the same as rounding before."""
    config = small.engine_config(dtype="bfloat16")
    one, two = (
        VllmEngine(str(path_of("qwen3", 1)), config, seed=0, launch_id=WORLD.launch_id)
        for _ in range(2)
    )
    one.load_weights(HfPolicy(path_of("qwen3", 2)).gathered_weights(), 1)
    two.load_weights(
        (
            (name, tensor.bfloat16())
            for name, tensor in HfPolicy(path_of("qwen3", 2)).gathered_weights()
        ),
        1,
    )
    answers = [
        engine.generate(small.make_prompts(8), small.sampling(**GREEDY)) for engine in (one, two)
    ]
    assert torch.equal(small.logprobs(answers[0]), small.logprobs(answers[1])) and small.tokens(
        answers[0]
    ) == small.tokens(answers[1])


def refused(
    change: Callable[[str, Tensor], tuple[str, Tensor] | None], *messages: str, usable: bool = False
) -> None:
    engine = start("qwen3", 1)
    before = engine.generate(small.make_prompts(4), small.sampling())
    try:
        update(Tampering(engine, change), "qwen3", 2)
    except WeightSyncError as error:
        assert all(message in str(error) for message in messages), error
    else:
        raise AssertionError("the update was accepted")
    if usable:
        assert small.tokens(
            engine.generate(small.make_prompts(4), small.sampling())
        ) == small.tokens(before)
        assert engine.weight_version == 0
        return
    for attempt in (
        lambda: engine.generate(small.make_prompts(1), small.sampling()),
        lambda: update(engine, "qwen3", 2),
    ):
        try:
            attempt()
        except RuntimeError as error:
            assert "half replaced" in str(error) and messages[0] in str(error), error
        else:
            raise AssertionError("the engine goes on with half of the weights")


TARGET = "model.layers.1.mlp.up_proj.weight"
FIRST = "lm_head.weight"


def at(
    target: str, change: Callable[[str, Tensor], tuple[str, Tensor] | None]
) -> Callable[[str, Tensor], tuple[str, Tensor] | None]:
    return lambda name, tensor: change(name, tensor) if name == target else (name, tensor)


def not_confirmed() -> None:
    """All weights are in, but the ranks' digests differ: what ``update_is_verified_over_ranks``
    finds. The engine stays unusable."""
    engine = start("qwen3", 1)

    def confirm() -> None:
        raise WeightSyncError("digests differ")

    try:
        engine.load_weights(HfPolicy(path_of("qwen3", 2)).gathered_weights(), 1, confirm)
    except WeightSyncError as error:
        assert str(error) == "digests differ"
    else:
        raise AssertionError("the comparison was not heard")
    try:
        engine.generate(small.make_prompts(1), small.sampling())
    except RuntimeError as error:
        assert "the update to weight version 1 failed: digests differ" in str(error), error
    else:
        raise AssertionError("the engine answers with weights that were not confirmed")
    assert engine.weight_version == 0


def faults() -> None:
    assert next(HfPolicy(path_of("qwen3", 2)).gathered_weights())[0] == FIRST
    refused(at(TARGET, lambda name, tensor: None), TARGET, "1 of 25 tensors were not sent")
    refused(
        at(TARGET, lambda name, tensor: ("model.layers.1.mlp.up.weight", tensor)),
        "model.layers.1.mlp.up.weight",
        "no such tensor",
        TARGET,
    )
    refused(
        at(TARGET, lambda name, tensor: (name, tensor[:-1])),
        TARGET,
        "shape [159, 128], the model has [160, 128]",
    )
    refused(
        at(TARGET, lambda name, tensor: (name, tensor.half())),
        TARGET,
        "torch.float16",
        "torch.float32",
    )
    refused(
        at(TARGET, lambda name, tensor: ("model.norm.weight", torch.ones(128))),
        "model.norm.weight",
        "twice",
    )
    refused(
        at(FIRST, lambda name, tensor: (name, tensor[:-1])), FIRST, "shape [95, 128]", usable=True
    )
    refused(lambda name, tensor: None, "25 of 25 tensors were not sent", usable=True)


def interrupted() -> None:
    """Any exception of the sender, not only a refusal, leaves the engine unusable."""
    engine = start("qwen3", 1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        for index, item in enumerate(HfPolicy(path_of("qwen3", 2)).gathered_weights()):
            if index == 9:
                raise OSError("the sender is gone")
            yield item

    with contextlib.suppress(OSError):
        engine.load_weights(broken(), 5)
    try:
        engine.generate(small.make_prompts(1), small.sampling())
    except RuntimeError as error:
        assert "the update to weight version 5 failed: the sender is gone" in str(error), error
    else:
        raise AssertionError("the engine goes on with half of the weights")


if __name__ == "__main__":
    archs = (
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "moonlight",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5",
        "qwen3_yarn",
        "gemma3",
        "gemma3_yarn",
        "mistral_window",
        "phi3",
        *small.BY_TRANSFORMERS,
        "qwen3",
        "qwen2_tied",
        "llama",
    )  # the first engine decides whether the process has expert groups
    for arch, seed in product(small.BY_TRANSFORMERS, (1, 2)):
        path_of(arch, seed)
    cases: dict[str, Callable[[], None]] = {
        f"updated_equals_fresh {arch}": partial(updated_equals_fresh, arch) for arch in archs
    }
    cases |= {f"filled_by_first_sync {arch}": partial(filled_by_first_sync, arch) for arch in archs}
    cases["unreached_reads_files qwen3"] = partial(unreached_reads_files, "qwen3")
    cases |= {
        f"unpacked_is_wrong {arch}": partial(unpacked_is_wrong, arch)
        for arch in ("qwen2_tied", "qwen3_moe")
    }
    small.run_cases(
        {
            **cases,
            **{
                case.__name__: case
                for case in (
                    no_group_has_a_limit,
                    prefix_cache,
                    bf16_engine_takes_float32,
                    not_confirmed,
                    faults,
                    interrupted,
                )
            },
        }
    )
