"""Program (1 process): the policy on ranks of large worlds that are not there; the messages of a
step against the formula.

Arguments: a folder for the models, then the names of the cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_rl.config.rules.layout_rules import stage_layers
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.models import Architecture
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.types import SequenceBatch, Shard
from tests import zoo
from tests.distributed.big_models import CASES, Case, train_layout, write_narrow
from tests.distributed.fake_world import Answers, Record, fake_world
from tests.distributed.step_formula import Messages, Place, Step, Work, differences
from tests.unit.weight_sync.training_tables import shape_from_hf, train_shards
from tools.planning.shard_table import expand

FOLDER = Path(sys.argv[1])
DIVISIBLE_BY = 16
PROMPT = 8


def loss(view: TokenView) -> LossOutput:
    return LossOutput(view.logprobs.sum() / 100, {})


def layers_of_stages(arch: Architecture, parallel: ParallelConfig) -> list[list[list[int]]]:
    """Numbers of the layers of every chunk of every stage: chunk after chunk they are dealt out to
    the stages in turn."""
    chunks = parallel.virtual_pipeline or 1
    found: list[list[list[int]]] = [[] for _ in range(parallel.pipeline)]
    number = 0
    for _ in range(chunks):
        for stage, count in enumerate(stage_layers(arch, parallel)):
            found[stage].append(list(range(number, number + count // chunks)))
            number += count // chunks
    return found


def work(case: Case, arch: Architecture, parallel: ParallelConfig) -> Work:
    """Sequences whose tokens divide evenly over context and tensor ranks, and then over experts."""
    evenly = arch.num_experts // arch.experts_per_token if arch.num_experts else 2
    return Work(case.microbatches, 2 * parallel.context * parallel.tensor * evenly, PROMPT)


def batch(todo: Work) -> SequenceBatch:
    tokens = list(range(3, 3 + todo.length))
    return sequence_batch(
        [(tokens[: todo.prompt], tokens[todo.prompt :]) for _ in range(todo.microbatches)]
    )


def fill(policy: MegatronPolicy) -> None:
    """Any finite weights: the rank that would read and send them is not there."""
    with torch.no_grad():
        for module in policy.modules:
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.02)
    policy.optimizer.reload_model_params()


def check(case: Case, rank: int, arch: Architecture, folder: Path) -> None:
    parallel = case.parallel(narrow=True)
    todo, chunks = work(case, arch, parallel), layers_of_stages(arch, parallel)
    share = todo.length // parallel.context // parallel.tensor
    balanced = share * arch.experts_per_token // arch.num_experts if arch.num_experts else 0
    whole_stages = [sorted(number for chunk in stage for number in chunk) for stage in chunks]
    answers = Answers((share, 1, arch.hidden_size), balanced, whole_stages)
    with fake_world(rank, case.ranks, answers):
        run = zoo.configured(
            folder, "precision=bf16", f"model.make_vocab_divisible_by={DIVISIBLE_BY}"
        )
        run = run.model_copy(update={"parallel": parallel})
        policy = zoo.configured_policy(run, todo.length)
        fill(policy)
        assert (
            policy.ranks.data * parallel.tensor * parallel.context * parallel.pipeline == case.ranks
        )
        stage = policy.ranks.pipeline_rank
        here = Place(
            stage, policy.ranks.context_rank, tuple(len(layers) for layers in chunks[stage])
        )
        step = Step(arch, parallel, case.ranks, here, todo, DIVISIBLE_BY)
        check_shards(case, rank, policy, folder)
        rows, microbatches = batch(todo), [[row] for row in range(todo.microbatches)]
        with Record(answers) as record:
            policy.score(LocalBatch(rows, microbatches))
        report(case, rank, "logprobs", step.logprobs(), record)
        with Record(answers) as record:
            policy.update(LocalBatch(rows, microbatches), loss)
        report(case, rank, "update", step.update(), record)
        if not parallel.overlap_param_gather:
            with Record(answers) as record:
                for _ in policy.gathered_weights():
                    pass
            report(case, rank, "gathering", step.gathering(), record)
        policy.close()


def check_shards(case: Case, rank: int, policy: MegatronPolicy, folder: Path) -> None:
    """The parts of tensors that the policy holds are those that weight syncs are planned with."""
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()))
    layout = train_layout(policy.parallel, case.ranks, DIVISIBLE_BY)
    declared = expand(train_shards(shape, layout, rank))
    live = policy.weight_shards()
    assert sorted(map(place, declared)) == sorted(map(place, live)), f"{case.name}, rank {rank}"
    print(f"OK {case.name}, rank {rank}, shards: {len(live)}", flush=True)


def place(shard: Shard) -> tuple[object, ...]:
    in_tensor = (shard.name, shard.start, shard.shape, shard.full)
    return (*in_tensor, shard.dtype, shard.key, shard.offset)


def report(case: Case, rank: int, what: str, expected: Messages, record: Record) -> None:
    found = list(differences(expected, record.calls, record.bytes))
    assert not found, "\n".join([f"{case.name}, rank {rank}, {what}:", *found])
    figures = f"{record.calls.total()} calls, {record.bytes.total()} bytes"
    print(f"OK {case.name}, rank {rank}, {what}: {figures}", flush=True)


if __name__ == "__main__":
    for case in (case for case in CASES if case.name in sys.argv[2:]):
        model = FOLDER / str(CASES.index(case))
        narrow = write_narrow(case, model)
        for rank in case.looked_at:
            check(case, rank, narrow, model)
