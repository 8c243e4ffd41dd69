"""Time of a planned weight sync against gather and broadcast, same run, same shards, median and quartiles of the repetitions.

    torchrun --standalone --nproc-per-node 4 tools/bench/sync.py --train tp=2,pp=2 --rollout tp=1,dp=4 --hidden 1024 --layers 8

Shards of a Qwen2-shaped model (random, not trained) stand in for both engines; what is timed is the movement alone. The two ways take
turns within each repetition, and both must leave the same bytes behind. Gather: every tensor whole on every process, from its first
holders, then cut. Prints one JSON object on rank 0; its `machine` says what else ran.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
import xxhash
from machine import Watch, description, spread
from torch import Tensor

from megatron_rl.weight_sync.boxes import Boxes, Rect
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes
from megatron_rl.weight_sync.plan import Side, make_plan
from megatron_rl.weight_sync.program import compile_program
from megatron_rl.weight_sync.transport import Transport, exchange, strided, tensors


def layout(kind: type, text: str) -> TrainLayout | RolloutLayout:
    """``"tp=2,pp=2"`` as a layout; an unknown name raises ValueError."""
    sizes = dict(item.split("=") for item in text.split(","))
    unknown = set(sizes) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)} in {text!r}; known: {[field.name for field in fields(kind)]}")
    return kind(**{name: int(value) for name, value in sizes.items()})


def allocate(boxes: Sequence[Boxes], fill: float | None) -> dict[str, Tensor]:
    """A flat tensor for each parameter that the boxes name: random, or all ``fill``."""
    sizes: dict[str, int] = {}
    for box in boxes:
        end = box.offset + sum((n - 1) * s for n, s in zip(box.shape, box.stride)) + 1
        for key in box.keys:
            sizes[key] = max(end, sizes[key]) if key in sizes else end
    dtype = getattr(torch, boxes[0].dtype) if boxes else torch.bfloat16
    return {key: torch.randn(n).to(dtype) if fill is None else torch.full((n,), fill, dtype=dtype) for key, n in sizes.items()}


def owners(held: Side) -> dict[str, list[tuple[Rect, int]]]:
    """For each tensor its distinct boxes and the first rank that holds each."""
    found: dict[str, dict[Rect, int]] = {}
    for rank in sorted(held):
        for box in held[rank]:
            for name in box.tensors:
                found.setdefault(name, {}).setdefault((box.start, box.shape), rank)
    return {name: list(rects.items()) for name, rects in found.items()}


class Gather:
    """Every tensor whole on every process, one after the other."""

    def __init__(self, held: Side, mine: Sequence[Boxes], wishes: Sequence[Boxes]) -> None:
        self.owners = owners(held)
        self.full = {name: (box.full, box.dtype) for boxes in held.values() for box in boxes for name in box.tensors}
        self.mine = {(name, (box.start, box.shape)): (box, i) for box in mine for i, name in enumerate(box.tensors)}
        self.wishes: dict[str, list[tuple[Boxes, int]]] = {}
        for box in wishes:
            for i, name in enumerate(box.tensors):
                self.wishes.setdefault(name, []).append((box, i))

    def run(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        for name, rects in self.owners.items():
            full, dtype = self.full[name]
            whole = torch.empty(full, dtype=getattr(torch, dtype))
            for rect, owner in rects:
                part = torch.empty(rect[1], dtype=whole.dtype)
                if owner == dist.get_rank():
                    box, i = self.mine[name, rect]
                    part.copy_(strided(source[box.keys[i]], (box.keys[i], box.offset, box.shape, box.stride)))
                dist.broadcast(part, owner)
                whole[window(rect)] = part
            for box, i in self.wishes[name] if name in self.wishes else ():
                view = (box.keys[i], box.offset, box.shape, box.stride)
                strided(target[box.keys[i]], view).copy_(whole[window((box.start, box.shape))])


def window(rect: Rect) -> tuple[slice, ...]:
    """The rectangle as an index."""
    return tuple(slice(a, a + n) for a, n in zip(*rect))


def timed(action) -> float:
    """Seconds from a common start until the last process is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    """Build both ways, run them in turn, compare what they left, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default="tp=2")
    parser.add_argument("--rollout", default="tp=1,dp=2")
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 4 tools/bench/sync.py ...")
    try:
        train, rollout = layout(TrainLayout, options.train), layout(RolloutLayout, options.rollout)
    except ValueError as error:
        parser.error(str(error))
    watch = Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    heads = options.hidden // 128
    model = ModelShape(options.layers, options.hidden, heads, max(1, heads // 4), 128, ffn=4 * options.hidden, vocab=32000, qkv_bias=True)
    mine = train_boxes(model, train, rank) if rank < train.ranks else []
    wishes = rollout_boxes(model, rollout, rank) if rank in rollout.ranks else []
    held, wanted = exchange(mine, wishes)
    plan = make_plan(held, wanted, gpus_per_node=dist.get_world_size(), bucket_bytes=options.bucket_mib << 20, replicas=rollout.replicas)
    torch.manual_seed(0)
    source, one, other = allocate(mine, None), allocate(wishes, 0.0), allocate(wishes, 0.0)
    for box in mine:  # copies of one slice on several processes are equal in a run; make them so
        for name, key in zip(box.tensors, box.keys):
            seed = xxhash.xxh32_intdigest(f"{name}{box.start}{box.shape}".encode())
            values = torch.randn(box.shape, generator=torch.Generator().manual_seed(seed)).to(source[key].dtype)
            strided(source[key], (key, box.offset, box.shape, box.stride)).copy_(values)
    transport, gather = Transport(compile_program(plan, rank, mine, wishes)), Gather(held, mine, wishes)
    reports, seconds = [], {"plan": [], "plan_verified": [], "gather": []}

    def verified() -> None:
        transport.compare(transport.run(tensors(source), tensors(one), checked=True))

    for _ in range(options.repetitions + 1):
        seconds["plan"].append(timed(lambda: reports.append(transport.run(tensors(source), tensors(one)))))
        seconds["plan_verified"].append(timed(verified))
        seconds["gather"].append(timed(lambda: gather.run(source, other)))
        assert all(torch.equal(one[key], other[key]) for key in one), "the two ways left different bytes"
    own = torch.tensor(watch.own_since(), dtype=torch.float64)
    dist.all_reduce(own)
    if rank == 0:
        found = {way: spread(times[1:]) for way, times in seconds.items()}  # the first warms up
        figures = {f"{way}_seconds": round(times.median, 4) for way, times in found.items()}
        figures |= {f"{way}_quartiles": [round(times.low, 4), round(times.high, 4)] for way, times in found.items()}
        pairs = list(zip(seconds["plan_verified"][1:], seconds["plan"][1:]))
        figures["digest_share"] = round(spread([(checked - plain) / checked for checked, plain in pairs]).median, 4)
        figures |= {"bytes_sent": plan.bytes_sent, "lower_bound": plan.lower_bound, "gather_bytes": plan.gather_bytes}
        figures |= {"bytes_local": plan.bytes_local, "peak_staging_bytes": reports[-1].peak_staging_bytes}
        print(json.dumps(figures | {"machine": f"{description()}; {watch.load(own.item())}"}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
