#!/usr/bin/env bash
# From nothing to a trained vision-language model, on two CPU cores: environment, tasks and toy Qwen2.5-VL (kept in .work/), training, a picture
# of prompts with the answers before and after. Arguments are overrides:
#   bash examples/vision_cpu/run.sh run_dir=runs/mine seed=2 trainer.num_steps=4 method=durian
set -euo pipefail
run_dir=runs/vision_cpu
# shellcheck source=SCRIPTDIR/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"

"$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 -m megatron_rl.train \
    experiment=vision_cpu model.path="$made/model" data.train="$made/tasks/train.parquet" data.eval="$made/tasks/eval.parquet" "$@"
[ ! -d "$run_dir/export" ] || "$python" "$repo/tools/before_after.py" "$run_dir" "${plugins[@]}"
