"""A rank among many with few open files: makes the groups of a run. Arguments: the soft limit, and
whether the launch is joined as a run joins it ("start") or as torch alone does ("torch")."""

import os
import resource
import sys

import torch.distributed as dist

from megatron_rl.runtime import launch

limit = int(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
if sys.argv[2] == "start":
    launch.start()
else:
    dist.init_process_group("gloo")
# Megatron's and vLLM's of the size of the world.
groups = [dist.new_group(backend="gloo") for _ in range(2)]
for group in groups:
    dist.barrier(group)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, {len(os.listdir('/proc/self/fd'))} open files")
dist.destroy_process_group()
