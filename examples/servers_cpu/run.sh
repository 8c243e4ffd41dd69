#!/usr/bin/env bash
# The quickstart with its rollouts on two vLLM servers, all on two CPU cores. Arguments are overrides, for trainer and servers alike:
#   bash examples/servers_cpu/run.sh seed=2
set -euo pipefail
# shellcheck source=SCRIPTDIR/../quickstart_cpu/toy.sh
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart_cpu/toy.sh"

words=(experiment=servers_cpu model.path="$model" "$@")
servers=()
# shellcheck disable=SC2329 # called by the trap
end_servers() {
    kill "${servers[@]}" 2>/dev/null || true
    wait
}
trap end_servers EXIT
for number in 1 2; do
    log=$repo/.work/server$number.log
    "$python" -m megatron_rl.serve "${words[@]}" >"$log" 2>&1 &
    servers+=("$!")
    echo "server $number writes to $log"
done
# It waits until the first of them is up; the other joins when it is.
"$python" -m megatron_rl.runtime.torchrun --standalone --nproc-per-node 2 -m megatron_rl.train "${words[@]}"
