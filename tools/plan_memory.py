"""Does a configuration fit into the GPUs? Nothing is built; only the model's config.json is read.

    python tools/plan_memory.py --world-size 8 --gpu-gib 80 experiment=qwen2_5_7b_8gpu model.path=/models/Qwen2.5-7B

The overrides are those of a training run (data files need not exist). Prints GiB by purpose for a rank of each pipeline stage; exit
code 1 and the key to change when something does not fit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.policy import memory
from megatron_rl.policy.families import read_architecture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True, help="number of processes (GPUs)")
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of one GPU, in GiB")
    parser.add_argument("--logprob-chunk-tokens", type=int, default=1024, help="tokens whose logits are alive at a time")
    parser.add_argument("--unfused", action="store_true", help="layers without Transformer Engine")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of a run")
    arguments = parser.parse_args()
    try:
        values = compose("config", ["data.train=-", "data.eval=-", *arguments.overrides])
        config = validate(Config, values, "the configuration")
        arch, _ = read_architecture(Path(config.model.path))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = memory.Sizes(
        arguments.world_size, config.batch.tokens_per_microbatch, arguments.logprob_chunk_tokens, config.model.make_vocab_divisible_by,
        fused=not arguments.unfused,
    )  # fmt: skip
    stages = memory.plan(arch, config.parallel, config.precision, config.rollout, sizes, arguments.gpu_gib)
    print(f"{'stage':20} " + "  ".join(f"{stage.stage:6d}" for stage in stages))
    for name in (field.name for field in fields(memory.StageMemory) if field.name != "stage"):
        print(f"{name + ' GiB':20} " + "  ".join(f"{getattr(stage, name) / memory.GIB:6.2f}" for stage in stages))
    for phase, names in memory.phases(config.rollout.sleep_level, config.memory.offload).items():
        row = "  ".join(f"{sum(getattr(stage, name) for name in names) / memory.GIB + memory.OVERHEAD_GIB:6.2f}" for stage in stages)
        print(f"{phase + ' in all GiB':20} {row}   ({', '.join(names)}, {memory.OVERHEAD_GIB:g} GiB for the context and communication)")
    found = memory.problems(stages, arguments.gpu_gib, config.rollout.sleep_level, config.memory.offload)
    for problem in found:
        print(f"does not fit: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
