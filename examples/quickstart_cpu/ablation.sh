#!/usr/bin/env bash
# Six methods and two baselines with five seeds each on the tasks of the quickstart, two runs at a time on a core each, and the report of all
# forty: grpo_token_mean averages and weighs the KL as mapo and durian_reasoning, grpo_no_kl has none as a_grae and negative_dominant. A run
# that is finished is not done again. Arguments are further overrides:
#   bash examples/quickstart_cpu/ablation.sh trainer.num_steps=2
set -euo pipefail
# shellcheck source=SCRIPTDIR/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"

"$python" -m megatron_rl.sweep --out runs/quickstart_ablation --nproc 1 --parallel 2 \
    --config-dir "$repo/examples/quickstart_cpu/baselines" experiment=quickstart_cpu parallel=single rollout.tensor=1 model.path="$model" \
    method=grpo,grpo_token_mean,grpo_no_kl,apo,a_grae,mapo,durian_reasoning,negative_dominant seed=1,2,3,4,5 \
    checkpoint.every_steps=0 checkpoint.export_at_end=false "$@"
"$python" "$repo/tools/report.py" runs/quickstart_ablation --no-links --baseline method=grpo \
    --metric eval/accuracy eval/pass_at_8 --title "Six methods, five seeds: the quickstart on two CPU cores"
