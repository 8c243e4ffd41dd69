"""Two processes, ``tensor`` 2 or 1: the samples of one process, weight updates checked over ranks,
names in shared memory.

With ``die`` as third argument both ranks are killed while the engine starts, when its shared memory
has names.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import vllm
from torch import Tensor

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.side_effects import DIRECTORY, PREFIX
from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime import launch
from megatron_rl.weight_sync.gather import GatherSync
from tests.numerics import rollout_models as small

FOLDER, TENSOR, MODE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WORLD = launch.start()


def segments() -> list[str]:
    return sorted(path.name for path in DIRECTORY.glob(f"{PREFIX}{WORLD.launch_id}*"))


if MODE == "die":
    build = vllm.LLM.__init__

    def build_and_die(*args: object, **kwargs: object) -> None:
        build(*args, **kwargs)
        WORLD.barrier()
        small.say("\n".join(segments()))
        WORLD.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    vllm.LLM.__init__ = build_and_die

ROOT = FOLDER / WORLD.launch_id
for arch, seed in (("qwen3", 0), ("qwen2_tied", 1)):
    if WORLD.rank == 0:
        small.write(arch, seed, ROOT)
WORLD.barrier()
ENGINES = {
    name: VllmEngine(
        str(ROOT / name), small.engine_config(tensor=TENSOR), seed=0, launch_id=WORLD.launch_id
    )
    for name in ("qwen3_0", "qwen2_tied_1")
}
PROMPTS = small.make_prompts(8)


class HfPolicy:
    """Sends the tensors of a HF model; rank 1 sends ``changed`` times 2 when it is given."""

    gathered_bytes_sent = 0

    def __init__(self, model: torch.nn.Module, changed: str | None = None) -> None:
        self.model, self.changed = model, changed

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            if name != "lm_head.weight" or not self.model.config.tie_word_embeddings:
                yield name, tensor * (2 if name == self.changed and WORLD.rank == 1 else 1)


def generate(engine: VllmEngine, sampling) -> list:
    """All prompts, shared out over the replicas."""
    size = len(PROMPTS) // engine.num_replicas
    mine = engine.generate(PROMPTS[engine.replica * size : (engine.replica + 1) * size], sampling)
    parts = WORLD.all_gather(mine)
    for rank in range(WORLD.size):
        assert parts[rank] == parts[rank // TENSOR * TENSOR], "ranks of one replica differ"
    return [group for part in parts[::TENSOR] for group in part]


def samples_equal_those_of_one_process() -> None:
    want_tokens, want_logprobs = json.loads((FOLDER / "one.json").read_text())
    groups = generate(ENGINES["qwen3_0"], small.sampling())
    assert small.tokens(groups) == want_tokens
    assert (
        small.logprobs(groups) - torch.tensor(want_logprobs, dtype=torch.float64)
    ).abs().max() <= 1e-4


def one_replica_may_be_idle() -> None:
    engine = ENGINES["qwen3_0"]
    part = (
        engine.generate(PROMPTS[:2], small.sampling())
        if engine.replica == 0
        else engine.generate([], small.sampling())
    )
    assert len(part) == (2 if engine.replica == 0 else 0)


def update_is_verified_over_ranks() -> None:
    engine, model = ENGINES["qwen2_tied_1"], small.build("qwen2_tied", 2)
    report = GatherSync(HfPolicy(model), engine, verify=True).sync(1)
    groups = generate(engine, small.sampling())
    assert (
        small.logprob_gap(model, PROMPTS, groups, lambda x: x) <= 1e-4
        and report.num_tensors == len(model.state_dict()) - 1
    )
    changed = "model.layers.0.self_attn.k_proj.bias"
    GatherSync(HfPolicy(model, changed), engine, verify=False).sync(2)  # what verify=False gives up
    try:
        GatherSync(HfPolicy(model, changed), engine, verify=True).sync(3)
    except WeightSyncError as error:
        assert f"1 of 26 tensors differ: {changed} (other bytes on rank 1 than on rank 0)" in str(
            error
        )
    else:
        raise AssertionError("ranks with different weights were accepted")
    one_rank_refuses(model)


def one_rank_refuses(model: torch.nn.Module) -> None:
    """The engine of rank 1 raises in the middle and its process stays: both ranks raise the same
    error, and neither engine goes on."""
    engine = ENGINES["qwen3_0"]
    load = engine.load_weights

    def fail(weights, version, confirm):
        return load(
            (item if index < 9 else broken() for index, item in enumerate(weights)),
            version,
            confirm,
        )

    def broken():
        raise OSError("no room for it")

    if WORLD.rank == 1:
        engine.load_weights = fail
    try:
        GatherSync(HfPolicy(small.build("qwen3", 2)), engine, verify=True).sync(4)
    except WeightSyncError as error:
        assert "rank 1: OSError: no room for it" in str(error), error
    else:
        raise AssertionError("rank 0 did not notice")
    try:
        engine.generate(PROMPTS, small.sampling())
    except RuntimeError as error:
        assert "the update to weight version 4 failed" in str(error) and "no room" in str(error)
    else:
        raise AssertionError("an engine of which one rank failed goes on")


def world_must_divide() -> None:
    try:
        VllmEngine(
            str(ROOT / "qwen3_0"), small.engine_config(tensor=3), seed=0, launch_id=WORLD.launch_id
        )
    except ValueError as error:
        assert "rollout.tensor: 2 processes do not divide into groups of 3" in str(error)
    else:
        raise AssertionError("three ranks out of two")


def sleeping_is_harmless() -> None:
    engine = ENGINES["qwen3_0"]
    before = engine.generate(PROMPTS[:2], small.sampling())
    engine.sleep()
    engine.wake()
    assert engine.generate(PROMPTS[:2], small.sampling()) == before


def names_are_gone() -> None:
    WORLD.barrier()
    assert segments() == [], (
        "a name that is left would stop nobody, but nothing would ever remove it"
    )


CASES = (
    samples_equal_those_of_one_process,
    one_replica_may_be_idle,
    world_must_divide,
    sleeping_is_harmless,
    names_are_gone,
    update_is_verified_over_ranks,  # the last: both engines are unusable afterwards
)

if __name__ == "__main__":
    small.run_cases(CASES)
