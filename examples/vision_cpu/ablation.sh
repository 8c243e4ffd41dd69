#!/usr/bin/env bash
# The methods of the four papers on the tasks of this example, three seeds each: fifteen runs and a table, one sweep command. A run that is
# finished is not done again. Arguments are further overrides:
#   bash examples/vision_cpu/ablation.sh trainer.num_steps=2 evaluation.num_prompts=16
set -euo pipefail
# shellcheck source=SCRIPTDIR/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"

"$python" -m megatron_rl.sweep --out runs/vision_ablation --nproc 2 --config-dir "$repo/examples/vision_cpu/ablation" \
    experiment=vision_cpu model.path="$made/model" data.train="$made/tasks/train.parquet" data.eval="$made/tasks/eval.parquet" \
    method=grpo,a_grae_half,apo,mapo,durian seed=1,2,3 trainer.num_steps=100 checkpoint.every_steps=0 checkpoint.export_at_end=false "$@"
