"""Does a configuration fit into the GPUs? Nothing is built; only the model's config.json is read.

    python tools/plan_memory.py --world-size 8 --gpu-gib 80 experiment=qwen2_5_7b_8gpu model.path=/models/Qwen2.5-7B

The overrides are those of a training run (data files need not exist). Prints GiB by purpose for a rank of each pipeline stage; exit
code 1 and the key to change when something does not fit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from megatron_rl.config.checks import check
from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.policy import memory
from megatron_rl.trainer.memory_plan import plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True, help="number of processes (GPUs)")
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of one GPU, in GiB")
    parser.add_argument("--host-gib", type=float, help="host memory of one GPU's process, in GiB; not looked at without it")
    parser.add_argument("--unfused", action="store_true", help="layers without Transformer Engine")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of a run")
    arguments = parser.parse_args()
    if arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size}: give the number of processes, 1 or more")
    if not arguments.gpu_gib > 0:
        parser.error(f"--gpu-gib {arguments.gpu_gib:g}: give the memory of a GPU, above 0")
    try:
        values = compose("config", [*arguments.overrides, "data.train=reasoning_gym:any", "data.eval=reasoning_gym:any"])
        config = validate(Config, values, "the configuration")
        check(config, arguments.world_size)
        room = memory.Room("cuda", arguments.gpu_gib, arguments.host_gib)
        stages = plan(config, arguments.world_size, room, fused=not arguments.unfused)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'stage':20} " + "  ".join(f"{stage.stage:6d}" for stage in stages))
    for name in (field.name for field in fields(memory.StageMemory) if field.name != "stage"):
        print(f"{name + ' GiB':20} " + "  ".join(f"{getattr(stage, name) / memory.GIB:6.2f}" for stage in stages))
    for phase, names in memory.phases(config, room.kind).items():
        overhead = memory.overhead_gib(phase, room.kind)
        row = "  ".join(f"{memory.needed_gib(stage, names, overhead):6.2f}" for stage in stages)
        beside = f"; {overhead:g} GiB for the context, communication and what a sleeping engine keeps" if overhead else ""
        print(f"{phase + ' GiB':20} {row}   ({', '.join(names)}{beside})")
    found = memory.problems(stages, config, room)
    for problem in found:
        print(f"does not fit: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
