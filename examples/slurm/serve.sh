#!/usr/bin/env bash
# One vLLM server for a run with source=servers, started again whenever it ends: a task of a Slurm step, see README.md here.
#   srun --ntasks-per-node 8 --gpus-per-task 1 bash examples/slurm/serve.sh run_dir=DIR experiment=NAME key=value ...
# The arguments are the overrides of the trainer. PYTHON, the interpreter: .venv/bin/python of the folder of submission.
set -uo pipefail
python=${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/python
address=$(scontrol show node "${SLURMD_NODENAME:?start it in a Slurm step}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
[ -n "$address" ] || { echo "serve.sh: scontrol gives no NodeAddr for node $SLURMD_NODENAME" >&2; exit 2; }
trap 'kill "$server" 2>/dev/null; wait; exit 0' TERM
trap '' USR1 # asks the trainer to save; servers continue
while true; do
    "$python" -m megatron_rl.serve --host "$address" "$@" &
    server=$!
    wait "$server"
    echo "serve.sh: the server on $address ended; starting it again"
    sleep 10
done
