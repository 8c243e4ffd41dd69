"""Plan a weight sync for machines one does not have: bytes by link, staging memory, the lower bound, estimated seconds.

    python tools/plan_sync.py --model 72b --train tp=8,pp=4,dp=2 --rollout tp=8,dp=8
    python tools/plan_sync.py --model qwen3-235b-a22b --train tp=4,pp=8,dp=4,ep=8 --rollout tp=8,dp=16 --json

No weight is allocated. The estimate is, for the busiest process, its larger direction over NVLink plus its larger direction over the
network, at the given speeds; copies on the device and latencies are left out. Rollout processes are the training processes, unless
``--disaggregated`` puts them behind those.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron_rl.errors import concerning
from megatron_rl.weight_sync.boxes import Boxes
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes
from megatron_rl.weight_sync.plan import Plan, Side, make_plan

PRESETS = {
    "7b": ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000),  # Llama 2 7B
    "qwen2.5-7b": ModelShape(28, 3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocab=152064, qkv_bias=True),
    "32b": ModelShape(64, 5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab=152064, qkv_bias=True),  # Qwen2.5 32B
    "72b": ModelShape(80, 8192, heads=64, kv_heads=8, head_dim=128, ffn=29568, vocab=152064, qkv_bias=True),  # Qwen2.5 72B
    "qwen3-235b-a22b": ModelShape(
        94, 4096, heads=64, kv_heads=4, head_dim=128, ffn=12288, vocab=151936, qk_norm=True, experts=128, moe_ffn=1536
    ),
}


def model_shape(name: str) -> ModelShape:
    """A preset, or the ``config.json`` of a HF directory. Raises ValueError when there is neither."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        presets = ", ".join(PRESETS)
        raise ValueError(f"--model {name}: no preset and no HF directory with config.json; give one of {presets}, or a directory")
    with concerning(f"--model {path}", "give the config.json of a HF model", (json.JSONDecodeError, LookupError, TypeError)):
        return ModelShape.from_hf(json.loads(path.read_text(encoding="utf-8")))


def parse_layout(kind: type, flag: str, text: str) -> TrainLayout | RolloutLayout:
    """``"tp=8,pp=4"`` as a layout. Raises ValueError naming an unknown size or a value that is no positive integer."""
    known = [field.name for field in fields(kind) if field.name != "first_rank"]
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in known or not value.isdigit() or int(value) < 1 or name in sizes:
            raise ValueError(f"{flag}: {item!r} is not one of {', '.join(known)} with a positive whole number, each once")
        sizes[name] = int(value)
    return kind(**sizes)


def even_out(model: ModelShape, train: TrainLayout) -> TrainLayout:
    """Where the layers do not divide over the stages and no uneven stages were asked for, shorter first and last stages."""
    if model.layers % train.pp == 0 or train.first_layers or train.last_layers:
        return train
    ends = model.layers - -(-model.layers // train.pp) * (train.pp - 2)
    return replace(train, first_layers=ends // 2, last_layers=ends - ends // 2)


def whole_tensors(held: Side) -> list[Boxes]:
    """Every tensor, whole: what each process receives in a gather and broadcast."""
    tensors: dict[str, Boxes] = {}
    for groups in held.values():
        for group in groups:
            for name in group.tensors:
                if name not in tensors:
                    tensors[name] = group
    grouped: dict[tuple, list[str]] = defaultdict(list)
    for name, group in tensors.items():
        grouped[group.full, group.dtype].append(name)
    return [Boxes(tuple(names), full, dtype, (0,) * len(full), full) for (full, dtype), names in grouped.items()]


def seconds(plan: Plan, gpus_per_node: int, nvlink_gb_s: float, network_gb_s: float) -> float:
    """Time of the busiest process at full link speed, directions at the same time."""
    load: dict[int, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
    for (src, dst, _), size in plan.streams.items():
        link = "node" if src // gpus_per_node == dst // gpus_per_node else "network"
        load[src][link, "out"] += size
        load[dst][link, "in"] += size
    speeds = {"node": nvlink_gb_s * 1e9, "network": network_gb_s * 1e9}
    return max(
        (sum(max(sides[link, "in"], sides[link, "out"]) / speed for link, speed in speeds.items()) for sides in load.values()), default=0.0
    )


def report(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures of one plan and of the gather and broadcast it replaces."""
    model = model_shape(arguments.model)
    train = even_out(model, parse_layout(TrainLayout, "--train", arguments.train))
    rollout = parse_layout(RolloutLayout, "--rollout", arguments.rollout)
    if arguments.disaggregated:
        rollout = replace(rollout, first_rank=train.ranks)
    elif train.ranks != len(rollout.ranks):
        raise ValueError(f"--train has {train.ranks} processes, --rollout {len(rollout.ranks)}: make them equal or add --disaggregated")
    began = time.perf_counter()
    held = {rank: train_boxes(model, train, rank) for rank in range(train.ranks)}
    wanted = {rank: rollout_boxes(model, rollout, rank) for rank in rollout.ranks}
    options = {"gpus_per_node": arguments.gpus_per_node, "bucket_bytes": arguments.bucket_mib << 20, "in_flight": arguments.in_flight}
    plan = make_plan(held, wanted, replicas=rollout.replicas, **options)
    took = time.perf_counter() - began
    whole = whole_tensors(held)
    gather = make_plan(held, dict.fromkeys(rollout.ranks, whole), **options)
    assert gather.bytes_sent == plan.gather_bytes
    speeds = (arguments.gpus_per_node, arguments.nvlink_gb_s, arguments.network_gb_s)
    return {
        "bytes_sent": plan.bytes_sent,
        "bytes_local": plan.bytes_local,
        "lower_bound": plan.lower_bound,
        "ratio": plan.ratio,
        "peak_staging_bytes": max(plan.schedule.peak_staging_bytes.values(), default=0),
        "gather_bytes": plan.gather_bytes,
        "bytes_same_node": plan.bytes_by_link["same_node"],
        "bytes_across_nodes": plan.bytes_by_link["across_nodes"],
        "gather_bytes_across_nodes": gather.bytes_by_link["across_nodes"],
        "rounds": plan.schedule.rounds,
        "seconds": seconds(plan, *speeds),
        "gather_seconds": seconds(gather, *speeds),
        "planning_seconds": took,
        "first_layers": train.first_layers or 0,
        "last_layers": train.last_layers or 0,
    }


def show(figures: Mapping[str, float]) -> None:
    """The figures as a table for people."""
    gb = lambda key: f"{figures[key] / 1e9:>12,.2f} GB"  # noqa: E731
    if figures["first_layers"]:
        print(f"uneven pipeline: first stage {figures['first_layers']:.0f} layers, last stage {figures['last_layers']:.0f}")
    print(f"{'':28}{'plan':>15}{'gather + broadcast':>22}")
    print(f"{'copied on the process':28}{gb('bytes_local')}")
    within = figures["gather_bytes"] - figures["gather_bytes_across_nodes"]
    print(f"{'sent within a node':28}{gb('bytes_same_node')}{within / 1e9:>19,.2f} GB")
    print(f"{'sent across nodes':28}{gb('bytes_across_nodes')}{figures['gather_bytes_across_nodes'] / 1e9:>19,.2f} GB")
    print(f"{'sent':28}{gb('bytes_sent')}{figures['gather_bytes'] / 1e9:>19,.2f} GB")
    print(f"{'lower bound':28}{gb('lower_bound')}   ratio {figures['ratio']:.2f}")
    print(f"{'peak staging of a process':28}{figures['peak_staging_bytes'] / 2**20:>11,.0f} MiB   in {figures['rounds']:.0f} rounds")
    print(f"{'estimated seconds':28}{figures['seconds']:>15.2f}{figures['gather_seconds']:>22.2f}")
    print(f"{'planned in':28}{figures['planning_seconds']:>13.2f} s")


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def speed(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with one line on stderr when the layouts do not fit the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help=f"HF directory, config.json, or one of {', '.join(PRESETS)}")
    parser.add_argument("--train", required=True, help="tp=8,pp=4,dp=2[,cp=,ep=,etp=,vpp=,first_layers=,last_layers=,vocab_multiple=]")
    parser.add_argument("--rollout", required=True, help="tp=8,dp=8[,ep=,vocab_multiple=]")
    parser.add_argument("--disaggregated", action="store_true", help="rollout processes are not training processes")
    parser.add_argument("--gpus-per-node", type=whole, default=8)
    parser.add_argument("--bucket-mib", type=whole, default=256)
    parser.add_argument("--in-flight", type=whole, default=2, help="rounds of buckets alive at once")
    parser.add_argument("--nvlink-gb-s", type=speed, default=400.0, help="GB/s of one GPU to its node, one direction")
    parser.add_argument("--network-gb-s", type=speed, default=45.0, help="GB/s of one GPU to other nodes, one direction")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        figures = report(arguments)
    except (ValueError, OSError) as error:
        print(f"plan_sync: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
