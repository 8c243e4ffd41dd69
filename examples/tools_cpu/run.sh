#!/usr/bin/env bash
# From nothing to a model that calls its tool, on two CPU cores: environment, toy model (kept in .work/), training, conversations before and after.
# Arguments are overrides:
#   bash examples/tools_cpu/run.sh run_dir=runs/mine seed=2 trainer.num_steps=4
set -euo pipefail
run_dir=runs/tools_cpu
toy=toy_tools_model
# shellcheck source=SCRIPTDIR/../quickstart_cpu/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart_cpu/toy.sh"

"$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 -m megatron_rl.train \
    experiment=tools_cpu model.path="$model" "$@"
[ -d "$run_dir/export" ] || exit 0 # stopped on request, or without an export
"$python" "$repo/tools/before_after.py" "$run_dir" "${plugins[@]}"
echo "picture: $run_dir/curves.png"
