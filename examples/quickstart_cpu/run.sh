#!/usr/bin/env bash
# From nothing to a trained model on two CPU cores: environment, toy model (kept in .work/), training, answers before and after.
# Arguments are overrides:
#   bash examples/quickstart_cpu/run.sh run_dir=runs/mine seed=2 trainer.num_steps=4 method=dapo
set -euo pipefail
run_dir=runs/quickstart_cpu
# shellcheck source=SCRIPTDIR/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"

"$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 -m megatron_rl.train \
    experiment=quickstart_cpu model.path="$model" "$@"
[ -d "$run_dir/export" ] || exit 0 # stopped on request, or without an export
python=${python#"$PWD/"}
"$python" "$repo/tools/before_after.py" "$run_dir" "${plugins[@]}"
cat <<EOF
picture: $run_dir/curves.png
next:
  $python -m megatron_rl.sample $run_dir --prompt "Spell this word backward (example: sun -> nus): milk"
  bash examples/quickstart_cpu/run.sh method=dapo run_dir=runs/dapo
  $python tools/report.py $run_dir runs/dapo --out runs/compared   # a page with both curves
EOF
