# shellcheck shell=bash disable=SC2034 # the variables are for the scripts that source this
# Sourced by the scripts beside it: environment, tasks and toy Qwen2.5-VL, kept in .work/ of the repository.
# Gives made, the folder that holds model/ and tasks/, and what common.sh does.
# shellcheck source=SCRIPTDIR/../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
bash "$repo/tools/setup_cpu.sh" vision

# The names carry what they are made by: a changed maker makes new ones. Written aside and renamed, so a half-made one is never used.
makers=("$repo/tools/make_vision_tasks.py" "$repo/tools/make_toy_vision_model.py" "$repo/tools/make_toy_model.py")
made=$repo/.work/toy_vision-$(cat "${makers[@]}" | sha256sum | cut -c1-12)
if [ ! -d "$made" ]; then
    mkdir -p "$repo/.work"
    aside=$(mktemp -d "$repo/.work/toy_vision.XXXXXX")
    trap 'rm -rf "$aside"' EXIT
    "$python" "${makers[0]}" --out "$aside/tasks"
    "$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 "${makers[1]}" --tasks "$aside/tasks" --out "$aside/model"
    mv -T "$aside" "$made"
fi
