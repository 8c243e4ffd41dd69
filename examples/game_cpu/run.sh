#!/usr/bin/env bash
# From nothing to a model that guesses by hints, on two CPU cores: environment, toy model and games (kept in .work/), training, conversations.
# Arguments are overrides:
#   bash examples/game_cpu/run.sh run_dir=runs/mine seed=2 trainer.num_steps=4
set -euo pipefail
run_dir=runs/game_cpu
toy=toy_game_model
# shellcheck source=SCRIPTDIR/../quickstart_cpu/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart_cpu/toy.sh"

game=$repo/examples/game_cpu/game.py
"$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 -m megatron_rl.train \
    --plugin "$game" experiment=game_cpu model.path="$model" "$@"
[ -d "$run_dir/export" ] || exit 0 # stopped on request, or without an export
"$python" "$repo/tools/before_after.py" "$run_dir" --plugin "$game" "${plugins[@]}"
echo "picture: $run_dir/curves.png"
