"""What token data of a step cost a rank: the whole batch on every rank, or its own rows alone.

    python tools/bench/data_plane.py [--responses 8192 --tokens 4096 --owners 64 --repeats 5]

Lengths are log-normal with a mean of --tokens, cut at four times that. Two tables, one line for
each way:

Building, in one process: what a rank computes from the data of a step until its first micro-batch,
and the mismatch metrics. "everything" unpickles, keeps and plans all responses. "owned" plans from
the lengths of all responses, and keeps the tokens of the rows that one of --owners ranks trains.

Exchange, in two processes over gloo: "everything" is a gather of all responses, half of them from
each process. "owned, 2 owners" sends every row to one of the two processes. "owned, a share" does
the same with as many rows as one of --owners ranks has, and gathers the scalars of all responses.

Memory is above that of the process with its input: the highest during the call, and what the result
keeps. Input is what stands there before: pickles that have arrived, completions of the own engine,
logprobs of the policy.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import pickle
import re
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_model import table
from machine import Watch, description, in_turns, spread
from whole_batch import FlatCompletions, mismatch, whole_batch

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.policy.batches.packing_plan import plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.rollouts.exchange import exchange_rows, token_rows
from megatron_rl.rollouts.experience import Responses, experience_of
from megatron_rl.rollouts.ownership import Route, owning_ranks
from megatron_rl.rollouts.partials import mismatch_of_partials, mismatch_partials
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.placement import Placement
from megatron_rl.types import Completion, Prompt, Score, Sequences

GROUP_SIZE = 8
PROMPT_TOKENS = 256
VOCABULARY = 151_000
QWEN_7B = WorkModel(70_452)
LIBC = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Cost:
    """Of one call: wall and processor seconds, MB at the highest point and kept by the result."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    kept_mb: float


def measured(action: Callable[[], Any]) -> Cost:
    gc.collect()
    LIBC.malloc_trim(0)
    # Resets the highest resident memory that the kernel keeps for this process.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory_mb("VmRSS")
    wall = time.perf_counter()
    cpu = time.process_time()
    result = action()
    cost = Cost(
        seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
        peak_mb=memory_mb("VmHWM") - before,
        kept_mb=memory_mb("VmRSS") - before,
    )
    del result
    return cost


def memory_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024 / 1e6


@dataclass(frozen=True)
class Case:
    """The batch of a step: N responses, of which any share can be drawn."""

    lengths: np.ndarray
    owners: int

    @classmethod
    def drawn(cls, responses: int, tokens: int, owners: int) -> Case:
        draw = np.random.default_rng(0)
        # The mean of exp(0.8 x) is exp(0.32).
        lengths = np.exp(np.log(tokens) - 0.32 + 0.8 * draw.standard_normal(responses))
        return cls(np.clip(lengths, 1, 4 * tokens).astype(np.int64), owners)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def completions(self, rows: range) -> list[Completion]:
        draw = np.random.default_rng(rows.start)
        result = []
        for length in self.lengths[rows.start : rows.stop].tolist():
            ids = array("i", draw.integers(0, VOCABULARY, length, dtype=np.int32).tobytes())
            logprobs = array("f", (-draw.random(length, dtype=np.float32)).tobytes())
            result.append(Completion(ids, logprobs, truncated=False, weight_version=1))
        return result

    def flat(self, rows: range) -> FlatCompletions:
        """What the rank that sampled ``rows`` sends when everybody gets everything."""
        completions = self.completions(rows)
        values = [(each.token_ids, each.sampler_logprobs) for each in completions]
        return FlatCompletions(
            group_sizes=array("i", [GROUP_SIZE] * (len(rows) // GROUP_SIZE)),
            lengths=array("i", self.lengths[rows.start : rows.stop].tolist()),
            truncated=array("b", [0] * len(rows)),
            weight_versions=array("q", [1] * len(rows)),
            token_ids=array("i", b"".join(ids.tobytes() for ids, _ in values)),
            sampler_logprobs=array("f", b"".join(logprobs.tobytes() for _, logprobs in values)),
        )

    def share(self, rank: int, ranks: int) -> range:
        groups = self.num_rows // GROUP_SIZE
        first = groups * rank // ranks
        return range(first * GROUP_SIZE, groups * (rank + 1) // ranks * GROUP_SIZE)

    def plan(self, work: WorkModel | None) -> list[list[list[int]]]:
        sequences = self.lengths + PROMPT_TOKENS
        return plan_microbatches(
            sequences.tolist(),
            range(self.num_rows),
            data_parallel_size=self.owners,
            tokens_per_microbatch=int(sequences.max()),
            multiple=1,
            work=work,
        )


class Building:
    """Both ways on one rank. Input is made here, outside what is measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = np.random.default_rng(1)
        num_groups = case.num_rows // GROUP_SIZE
        self.prompts = [
            Prompt(str(group), tuple(draw.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()), "", "")
            for group in range(num_groups)
        ]
        self.arrived = [
            pickle.dumps(case.flat(case.share(rank, case.owners))) for rank in range(case.owners)
        ]
        self.old_logprobs = torch.zeros(int(case.lengths.sum()))
        self.sampled = case.completions(case.share(0, case.owners))
        plan = case.plan(QWEN_7B)
        self.owners = owning_ranks([plan], case.num_rows, range(case.owners))
        self.scores = [Score(0.0, False) for _ in range(case.num_rows)]
        owned = sorted(row for rows in plan[0] for row in rows)
        lengths = case.lengths[owned]
        tokens = int(lengths.sum())
        self.received = TokenRows(
            np.array(owned),
            lengths,
            {
                "token_ids": draw.integers(0, VOCABULARY, tokens, dtype=np.int32),
                "sampler_logprobs": -draw.random(tokens, dtype=np.float32),
            },
        )

    def everything(self) -> Any:
        groups = [group for part in self.arrived for group in pickle.loads(part).groups()]
        batch, sampler_logprobs = whole_batch(self.prompts, groups)
        plan = self.case.plan(None)
        index = batch.response_index
        metrics = mismatch(self.old_logprobs, sampler_logprobs)
        return groups, batch, sampler_logprobs, plan, index, metrics

    def owned(self) -> Any:
        """With every row at home already: an exchange has a table of its own."""
        case = self.case
        held = token_rows(range(len(self.sampled)), self.sampled)
        placement = Placement(OwnersPlan(case), World(0, 1, 0, "bench"))
        experience = placement.at_home(experience_of(self.responses()))
        assert experience.share is not None
        index = experience.share.batch.response_index
        tokens = experience.responses.tokens
        sampler = tokens.columns["sampler_logprobs"]
        partials = np.zeros((case.num_rows, 4))
        partials[tokens.rows] = mismatch_partials(
            self.old_logprobs[: len(sampler)].numpy(), sampler, tokens.lengths
        )
        metrics = mismatch_of_partials(partials, int(case.lengths.sum()))
        return held, experience, index, partials, metrics

    def responses(self) -> Responses:
        """The scalars of all, the tokens of those that rank 0 owns."""
        case = self.case
        rows = np.arange(case.num_rows)
        return Responses(
            prompts=[self.prompts[row // GROUP_SIZE] for row in range(case.num_rows)],
            group_ids=rows // GROUP_SIZE,
            lengths=case.lengths,
            truncated=rows < 0,
            weight_versions=rows * 0 + 1,
            scores=self.scores,
            tokens=self.received,
            holders=self.owners,
        )


@dataclass(frozen=True)
class OwnersPlan:
    """``protocols.Placing`` of the first of many owners, each a rank of its own."""

    case: Case
    data_rank: int = 0

    @property
    def owners(self) -> range:
        return range(self.case.owners)

    def plan(self, sequences: Sequences, rows: Sequence[int]) -> list[list[list[int]]]:
        return self.case.plan(QWEN_7B)

    def give(self, values: torch.Tensor) -> None:
        """The owner works alone."""


class Exchange:
    """The three ways between two processes."""

    def __init__(self, case: Case, world: World) -> None:
        self.case = case
        self.world = world
        self.half = case.flat(case.share(world.rank, 2))
        self.of_half = self.rows(2)
        self.of_share = self.rows(case.owners)

    def rows(self, ranks: int) -> tuple[TokenRows, Route]:
        """Two of ``ranks`` ranks: their rows go to the two by turns."""
        case = self.case
        source = np.full(case.num_rows, -1)
        for rank in range(2):
            share = case.share(rank, ranks)
            source[share.start : share.stop] = rank
        share = case.share(self.world.rank, ranks)
        target = np.where(source < 0, -1, np.arange(case.num_rows) % 2)
        held = token_rows(share, case.completions(share))
        return held, Route(case.lengths, source, target)

    def everything(self) -> Any:
        return [part.groups() for part in self.world.all_gather(self.half)]

    def two_owners(self) -> Any:
        return exchange_rows(*self.of_half, self.world)

    def a_share(self) -> Any:
        rows = self.case.num_rows // 2
        scalars = {
            "lengths": self.case.lengths[:rows],
            "rewards": np.zeros(rows, np.float32),
            "correct": np.zeros(rows, bool),
            "truncated": np.zeros(rows, bool),
            "weight_versions": np.zeros((rows, 2), np.int64),
        }
        return self.world.all_gather(scalars), exchange_rows(*self.of_share, self.world)


def exchange_rank(options: argparse.Namespace) -> None:
    """One of the two processes; prints its costs as JSON."""
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=2
    )
    world = World(options.rank, 2, options.rank, "bench", dist.group.WORLD)
    case = Case.drawn(options.responses, options.tokens, options.owners)
    exchange = Exchange(case, world)
    ways = {
        "everything": exchange.everything,
        "owned, 2 owners": exchange.two_owners,
        "owned, a share": exchange.a_share,
    }
    costs = costs_of(ways, options.repeats, world.barrier)
    print(json.dumps({way: [asdict(cost) for cost in of_way] for way, of_way in costs.items()}))
    dist.destroy_process_group()


def costs_of(
    ways: Mapping[str, Callable[[], Any]], repeats: int, before: Callable[[], Any]
) -> dict[str, list[Cost]]:
    """In turns, after one call of each that is not counted; ``before`` is called ahead of each."""

    def one(action: Callable[[], Any]) -> Cost:
        before()
        return measured(action)

    for action in ways.values():
        one(action)
    return in_turns(
        {way: lambda action=action: one(action) for way, action in ways.items()}, repeats
    )


def exchange_costs(options: argparse.Namespace) -> dict[str, list[Cost]]:
    """Of the slower process in each repeat."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"--store={folder}/store"]
        command += [f"--{name}={getattr(options, name)}" for name in SIZES]
        ranks = [
            subprocess.Popen([*command, f"--rank={rank}"], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        outputs = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return {
        way: [
            max((Cost(**first), Cost(**second)), key=lambda cost: cost.seconds)
            for first, second in zip(outputs[0][way], outputs[1][way], strict=True)
        ]
        for way in outputs[0]
    }


def lines(costs: Mapping[str, list[Cost]]) -> list[dict[str, object]]:
    """A line for each way: seconds with quartiles, the most memory of all repeats."""
    return [
        {
            "way": way,
            "wall s": spread([cost.seconds for cost in repeats]).text(3),
            "processor s": spread([cost.cpu_seconds for cost in repeats]).text(3),
            "peak MB": f"{max(cost.peak_mb for cost in repeats):.0f}",
            "kept MB": f"{max(cost.kept_mb for cost in repeats):.0f}",
        }
        for way, repeats in costs.items()
    ]


SIZES = {"responses": 8192, "tokens": 4096, "owners": 64, "repeats": 5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank is not None:
        exchange_rank(options)
        return
    watch = Watch()
    case = Case.drawn(options.responses, options.tokens, options.owners)
    building = Building(case)
    ways = {"everything": building.everything, "owned": building.owned}
    built = costs_of(ways, options.repeats, lambda: None)
    del building
    exchanged = exchange_costs(options)
    tokens = int(case.lengths.sum()) / 1e6
    print(
        f"{case.num_rows} responses, {tokens:.1f} million tokens, {case.owners} owners;"
        f" {description()}, torch {torch.__version__}; {watch.load()}\n"
    )
    print(f"Building\n\n{table(lines(built))}\n\nExchange\n\n{table(lines(exchanged))}")


if __name__ == "__main__":
    main()
