#!/usr/bin/env bash
# From nothing to a trained model on two CPU cores: environment, toy model (kept in .work/), training. Arguments are overrides:
#   bash examples/quickstart_cpu/run.sh run_dir=runs/mine seed=2 trainer.num_steps=4 method=dapo
set -euo pipefail
# shellcheck source=SCRIPTDIR/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"

exec "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_rl.train \
    experiment=quickstart_cpu model.path="$model" "$@"
