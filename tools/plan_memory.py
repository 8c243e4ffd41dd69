"""Does a configuration fit into the GPUs? Nothing is built; only the model's config.json is read.

    python tools/plan_memory.py --world-size 8 --gpu-gib 80 experiment=qwen2_5_7b_8gpu \\
        model.path=/models/Qwen2.5-7B

The overrides are those of a training run (data files need not exist). Prints GiB by purpose for a
rank of each pipeline stage; exit code 1 and the key to change when something does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.checks import check
from megatron_rl.config.schema import Config
from megatron_rl.planning.at_start import plan
from megatron_rl.planning.memory import StageMemory
from megatron_rl.planning.phases import MemoryBudget, needed_gib, overhead_gib, phases, problems


def main() -> int:
    arguments = read_arguments()
    # Any set that exists: what is trained on does not change the memory.
    data = ["data.train=reasoning_gym:any", "data.eval=reasoning_gym:any"]
    room = MemoryBudget("cuda", arguments.gpu_gib, arguments.host_gib)
    try:
        values = compose("config", [*arguments.overrides, *data])
        config = validate(Config, values, "the configuration")
        check(config, arguments.world_size)
        stages = plan(config, arguments.world_size, room, fused=not arguments.unfused)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(stages, config, room)
    messages = problems(stages, config, room)
    for message in messages:
        print(f"does not fit: {message}")
    return 1 if messages else 0


def read_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--world-size", type=int, required=True, help="number of processes (GPUs)")
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of one GPU, in GiB")
    parser.add_argument(
        "--host-gib",
        type=float,
        help="host memory of one GPU's process, in GiB; not checked without it",
    )
    parser.add_argument("--unfused", action="store_true", help="layers without Transformer Engine")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of a run")
    arguments = parser.parse_args()
    if arguments.world_size < 1:
        parser.error(
            f"--world-size {arguments.world_size}: give the number of processes, 1 or more"
        )
    if not arguments.gpu_gib > 0:
        parser.error(f"--gpu-gib {arguments.gpu_gib:g}: give the memory of a GPU, above 0")
    return arguments


def print_table(stages: Sequence[StageMemory], config: Config, room: MemoryBudget) -> None:
    """A column for each stage; a row for each purpose, then one for each phase."""
    print(f"{'stage':22} " + "  ".join(f"{stage.stage:6d}" for stage in stages))
    for field in fields(StageMemory):
        if field.name != "stage":
            print(_row(field.name, [needed_gib(stage, [field.name]) for stage in stages]))
    for phase, names in phases(config, room.kind).items():
        overhead = overhead_gib(phase, room.kind)
        held = ", ".join(names)
        if overhead:
            held += (
                f"; {overhead:g} GiB for the context, communication and what a sleeping engine"
                " keeps"
            )
        row = _row(phase, [needed_gib(stage, names, overhead) for stage in stages])
        print(f"{row}   ({held})")


def _row(name: str, gib: Sequence[float]) -> str:
    return f"{name + ' GiB':22} " + "  ".join(f"{size:6.2f}" for size in gib)


if __name__ == "__main__":
    sys.exit(main())
