"""Plan a weight sync for machines one does not have: bytes by link, staging memory, the lower
bounds, simulated seconds.

    python tools/plan_sync.py --model 72b --train tp=8,pp=4,dp=2 --rollout tp=8,dp=8
    python tools/plan_sync.py --model qwen3-235b-a22b --train tp=4,pp=8,dp=4,ep=8 \\
        --rollout tp=8,dp=16 --json

    python tools/plan_sync.py --model 72b --train tp=8,pp=4,dp=2 --rollout tp=2,dp=224 \\
        --disaggregated --network-gb-s 50

No weight is allocated. The seconds are simulated message by message, in the order in which the
transport sends them, at the given speeds; the least is that of the busiest link. Copies on the
device are left out, and so are latencies unless they are given. Rollout processes are the training
processes, unless ``--disaggregated`` puts them behind those.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.errors import concerning
from megatron_rl.models import FAMILIES, Architecture, architecture_from, deepseek_v3
from megatron_rl.weight_sync.planner.plan import PlanSettings, make_plan
from tools.planning.plan_figures import num_peers, peak_staging_bytes
from tools.planning.sync_forecast import rollout_side, training_side, whole_tensors
from tools.planning.sync_time import Links, least_seconds, simulated_seconds
from tools.planning.training_shards import TrainingLayout, parse_rollout, parse_training


def _sizes(family: str, architecture: str, *sizes: int, **more: int | bool) -> dict[str, Any]:
    """What is in the config.json of a model, as far as sizes go: layers, hidden and intermediate
    size, attention and key-value heads, vocabulary."""
    layers, hidden, intermediate, heads, kv_heads, vocab = sizes
    return {
        "model_type": family,
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


QWEN2 = ("qwen2", "Qwen2ForCausalLM")
GPT_OSS = ("gpt_oss", "GptOssForCausalLM")
DELTA = dict(
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    max_position_embeddings=262144,
)
DEEPSEEK = deepseek_v3.ROUTER | dict(
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
)
PRESETS = {
    "7b": _sizes("llama", "LlamaForCausalLM", 32, 4096, 11008, 32, 32, 32000),  # Llama 2 7B
    "qwen2.5-7b": _sizes(*QWEN2, 28, 3584, 18944, 28, 4, 152064),
    "32b": _sizes(*QWEN2, 64, 5120, 27648, 40, 8, 152064),  # Qwen2.5 32B
    "72b": _sizes(*QWEN2, 80, 8192, 29568, 64, 8, 152064),  # Qwen2.5 72B
    "phi-4": _sizes("phi3", "Phi3ForCausalLM", 40, 5120, 17920, 40, 10, 100352),
    "olmo-3-32b": _sizes("olmo3", "Olmo3ForCausalLM", 64, 5120, 27648, 40, 8, 100278),
    "qwen3-235b-a22b": _sizes(
        *("qwen3_moe", "Qwen3MoeForCausalLM", 94, 4096, 12288, 64, 4, 151936),
        head_dim=128,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "glm-4.5": _sizes(
        *("glm4_moe", "Glm4MoeForCausalLM", 92, 5120, 12288, 96, 8, 151552),
        head_dim=128,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        attention_bias=True,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
        partial_rotary_factor=0.5,
    ),
    # What is not here is in transformers: windows, YaRN, head size, experts per token.
    "gpt-oss-20b": _sizes(*GPT_OSS, 24, 2880, 2880, 64, 8, 201088, num_local_experts=32),
    "gpt-oss-120b": _sizes(*GPT_OSS, 36, 2880, 2880, 64, 8, 201088, num_local_experts=128),
    "qwen3-next-80b": _sizes(
        *("qwen3_next", "Qwen3NextForCausalLM", 48, 2048, 5120, 16, 2, 151936),
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        **DELTA,
    ),
    "qwen3.5-9b": _sizes(
        *("qwen3_5_text", "Qwen3_5ForCausalLM", 32, 4096, 12288, 16, 4, 248320), **DELTA
    ),
    "qwen3.5-35b": _sizes(
        *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", 40, 2048, 512, 16, 2, 248320),
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        **DELTA,
    ),
    "deepseek-v3": _sizes(
        *("deepseek_v3", "DeepseekV3ForCausalLM", 61, 7168, 18432, 128, 128, 129280),
        **DEEPSEEK,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
    ),
    "kimi-k2": _sizes(
        *("kimi_k2", "DeepseekV3ForCausalLM", 61, 7168, 18432, 64, 64, 163840),
        **DEEPSEEK,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
    ),
}


def architecture(name: str) -> Architecture:
    """Of a preset, or of the ``config.json`` of a HF directory. Raises ValueError when there is
    neither, or when the policy does not know the family."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if name not in PRESETS and not path.is_file():
        presets = ", ".join(PRESETS)
        raise ValueError(
            f"--model {name}: no preset and no HF directory with config.json; give one of"
            f" {presets}, or a directory"
        )
    with concerning(
        f"--model {path}",
        "give the config.json of a HF model",
        (json.JSONDecodeError, LookupError, TypeError),
    ):
        values = PRESETS.get(name) or json.loads(path.read_text(encoding="utf-8"))
        family = values["model_type"]
        declared = values["architectures"][0]
    if declared not in FAMILIES:
        raise ValueError(
            f"--model {name}: architecture {declared} is not known to the policy; known:"
            f" {', '.join(FAMILIES)}"
        )
    keys = {key: value for key, value in values.items() if key != "model_type"}
    return architecture_from(AutoConfig.for_model(family, **keys), declared)


def even_out(arch: Architecture, layout: TrainingLayout) -> TrainingLayout:
    """Where the layers do not divide over the stages and no uneven stages were asked for, shorter
    first and last stages."""
    parallel = layout.parallel
    uneven = parallel.first_stage_layers or parallel.last_stage_layers
    if uneven or arch.num_layers % parallel.pipeline == 0:
        return layout
    longest = -(-arch.num_layers // parallel.pipeline)
    ends = arch.num_layers - longest * (parallel.pipeline - 2)
    changes = {"first_stage_layers": ends // 2, "last_stage_layers": ends - ends // 2}
    return replace(layout, parallel=parallel.model_copy(update=changes))


def report(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures of one plan and of the gather and broadcast it replaces."""
    arch = architecture(arguments.model)
    train = even_out(arch, parse_training("--train", arguments.train))
    rollout = parse_rollout("--rollout", arguments.rollout)
    if arguments.disaggregated:
        rollout = replace(rollout, first_rank=train.world_size)
    elif train.world_size != len(rollout.ranks):
        raise ValueError(
            f"--train has {train.world_size} processes, --rollout {len(rollout.ranks)}: make them"
            " equal or add --disaggregated"
        )
    began = time.perf_counter()
    sources = training_side(arch, train)
    targets = rollout_side(arch, rollout, train.dtype)
    settings = PlanSettings(
        cast=True,  # as in a run
        bucket_bytes=arguments.bucket_mib << 20,
        rounds_in_flight=arguments.rounds_in_flight,
        gpus_per_node=arguments.gpus_per_node,
    )
    plan = make_plan(sources, targets, replace(settings, replicas=rollout.replicas))
    took = time.perf_counter() - began
    whole = whole_tensors(sources)
    gather = make_plan(sources, dict.fromkeys(rollout.ranks, whole), settings)
    links = Links(arguments.nvlink_gb_s, arguments.network_gb_s, arguments.latency_us)
    return {
        "bytes_sent": plan.bytes_sent,
        "bytes_local": plan.bytes_local,
        "lower_bound": plan.lower_bound,
        "node_bound": plan.node_bound,
        "most_peers": int(num_peers(plan.flows).max(initial=0)),
        "peak_staging_bytes": max(peak_staging_bytes(plan.schedule).values(), default=0),
        "gather_bytes": gather.bytes_sent,
        "bytes_same_node": plan.bytes_by_link["same_node"],
        "bytes_across_nodes": plan.bytes_by_link["across_nodes"],
        "gather_bytes_across_nodes": gather.bytes_by_link["across_nodes"],
        "rounds": plan.schedule.rounds,
        "seconds": simulated_seconds(plan, links),
        "least_seconds": least_seconds(plan, links),
        "gather_seconds": simulated_seconds(gather, links),
        "planning_seconds": took,
        "first_layers": train.parallel.first_stage_layers or 0,
        "last_layers": train.parallel.last_stage_layers or 0,
    }


def show(figures: Mapping[str, float]) -> None:
    """The figures as a table for people."""

    def gb(key: str) -> str:
        return f"{figures[key] / 1e9:>12,.2f} GB"

    if figures["first_layers"]:
        print(
            f"uneven pipeline: first stage {figures['first_layers']:.0f} layers, last stage"
            f" {figures['last_layers']:.0f}"
        )
    print(f"{'':28}{'plan':>15}{'gather + broadcast':>22}")
    print(f"{'copied on the process':28}{gb('bytes_local')}")
    within = figures["gather_bytes"] - figures["gather_bytes_across_nodes"]
    print(f"{'sent within a node':28}{gb('bytes_same_node')}{within / 1e9:>19,.2f} GB")
    across = figures["gather_bytes_across_nodes"]
    print(f"{'sent across nodes':28}{gb('bytes_across_nodes')}{across / 1e9:>19,.2f} GB")
    print(f"{'sent':28}{gb('bytes_sent')}{figures['gather_bytes'] / 1e9:>19,.2f} GB")
    print(f"{'lower bound across nodes':28}{gb('node_bound')}")
    print(f"{'lower bound':28}{gb('lower_bound')}")
    print(
        f"{'peak staging of a process':28}{figures['peak_staging_bytes'] / 2**20:>11,.0f} MiB   in"
        f" {figures['rounds']:.0f} rounds"
    )
    print(f"{'peers of a process':28}{figures['most_peers']:>15.0f}")
    print(f"{'simulated seconds':28}{figures['seconds']:>15.2f}{figures['gather_seconds']:>22.2f}")
    print(f"{'least, by the busiest link':28}{figures['least_seconds']:>15.2f}")
    print(f"{'planned in':28}{figures['planning_seconds']:>13.2f} s")


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def add_links(parser: argparse.ArgumentParser) -> None:
    """The nodes and their links, as every planner of runs and syncs takes them."""
    add = parser.add_argument
    add("--gpus-per-node", type=whole, default=8)
    to_node = "GB/s of one GPU to its node, one direction"
    add("--nvlink-gb-s", type=positive, default=400.0, help=to_node)
    to_others = "GB/s of one GPU to other nodes, one direction"
    add("--network-gb-s", type=positive, default=45.0, help=to_others)


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", required=True, help=f"HF directory, config.json, or one of {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--train",
        required=True,
        help="tp=8,pp=4,dp=2[,cp=,ep=,etp=,vpp=,first_layers=,last_layers=,vocab_multiple=]",
    )
    parser.add_argument("--rollout", required=True, help="tp=8,dp=8[,pp=,ep=,vocab_multiple=]")
    parser.add_argument(
        "--disaggregated", action="store_true", help="rollout processes are not training processes"
    )
    add_links(parser)
    parser.add_argument("--bucket-mib", type=whole, default=256)
    parser.add_argument(
        "--rounds-in-flight", type=whole, default=2, help="rounds that may hold buffers at once"
    )
    parser.add_argument(
        "--latency-us", type=float, default=0.0, help="microseconds of a message, beside its bytes"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with one line on stderr when the layouts do not fit the model."""
    arguments = options().parse_args(argv)
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
