"""Takes the place of the training program under the batch script: counts steps, keeps the same
contract on SIGUSR1.

The contract: ``run_dir=DIR``; on SIGUSR1 all ranks finish the step, rank 0 saves and writes
``<run_dir>/requeue``, exit code 0; ``resume=auto`` goes on from what was saved.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.runtime.guard.signals import noted_stop

NUM_STEPS = 40


def main(settings: dict[str, str]) -> None:
    stop = noted_stop()
    dist.init_process_group("gloo")
    folder, main_rank = Path(settings["run_dir"]), dist.get_rank() == 0
    saved = folder / "step"
    step = int(saved.read_text()) if settings["resume"] == "auto" and saved.exists() else 0
    note(
        folder,
        f"start at {step}, world {dist.get_world_size()}, restart"
        f" {os.environ.get('SLURM_RESTART_COUNT', '0')}",
    )
    while step < NUM_STEPS:
        time.sleep(0.5)
        step += 1
        wanted = torch.tensor(int(stop()))
        dist.all_reduce(wanted)
        if wanted:
            if main_rank:
                saved.write_text(str(step))
                (folder / "requeue").write_text(f"{step}\n")
            note(folder, f"stopped at {step}, {int(wanted)} ranks were asked")
            break
    else:
        note(folder, f"finished at {step}")
    dist.destroy_process_group()


def note(folder: Path, text: str) -> None:
    if dist.get_rank() == 0:
        with open(folder / "notes", "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
