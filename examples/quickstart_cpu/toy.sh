# shellcheck shell=bash disable=SC2034 # the variables are for the scripts that source this
# Sourced by scripts of the examples: environment and toy model, kept in .work/ of the repository. Gives model, and what common.sh does.
# shellcheck source=SCRIPTDIR/../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
bash "$repo/tools/setup_cpu.sh"

# The name carries what the model is made by: a changed maker makes a new one. Written aside and renamed, so a half-made one is never used.
toy=${toy:-toy_model}
makers=("$repo/tools/make_$toy.py")
[ "$toy" = toy_model ] || makers+=("$repo/tools/make_toy_model.py") # which it imports
[ "$toy" != toy_game_model ] || makers+=("$repo/tools/make_toy_tools_model.py" "$repo/examples/game_cpu/game.py")
model=$repo/.work/$toy-$(cat "${makers[@]}" | sha256sum | cut -c1-12)
if [ ! -d "$model" ]; then
    mkdir -p "$repo/.work"
    aside=$(mktemp -d "$repo/.work/$toy.XXXXXX")
    trap 'rm -rf "$aside"' EXIT
    "$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 "${makers[0]}" --out "$aside/model"
    mv -T "$aside/model" "$model"
    rm -rf "$aside"
fi
