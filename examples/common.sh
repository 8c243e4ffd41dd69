# shellcheck shell=bash disable=SC2034 # the variables are for the scripts that source this
# Sourced by the toy.sh of an example. Gives repo, python, plugins (the --plugin words of the command line) and run_dir (of the command line, else as it
# was).
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$repo/.venv/bin/python

# Two spinning OpenMP threads per process on two cores are up to thirty times slower; the compiler's first call costs seconds.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export TORCH_CPP_LOG_LEVEL=ERROR # not a line about memory nodes from every rank

plugins=()
previous=
for word in "$@"; do
    case $word in run_dir=*) run_dir=${word#run_dir=} ;; --plugin=*) plugins+=("$word") ;; esac
    [ "$previous" != --plugin ] || plugins+=(--plugin "$word")
    previous=$word
done
