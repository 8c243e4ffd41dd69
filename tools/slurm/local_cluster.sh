#!/usr/bin/env bash
# A real Slurm of N nodes on this one machine, to try batch scripts: no systemd, no accounting, no cgroups. Needs root and the packages
# slurmctld, slurmd, slurm-client and munge (written for Slurm 22.05).
#
#   bash tools/slurm/local_cluster.sh up DIR [N]     then: export SLURM_CONF=DIR/slurm.conf
#   bash tools/slurm/local_cluster.sh down DIR
#
# All state is in DIR (an absolute path, short: a socket lies there). The nodes are node1..nodeN, all at 127.0.0.1.
set -euo pipefail

fail() {
    echo "local_cluster: $*" >&2
    exit 1
}

wait_for() { # wait_for SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "timed out waiting for $what; logs: $dir"
        sleep 0.1
    done
}

write_configuration() {
    local host
    host=$(hostname -s)
    cat >"$dir/slurm.conf" <<EOF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base_port
FirstJobId=$base_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge.sock
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/backfill
ReturnToService=2
KillWait=10
NodeName=node[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((base_port + 1))-$((base_port + nodes))] CPUs=$(nproc) RealMemory=1000
PartitionName=local Nodes=node[1-$nodes] Default=YES MaxTime=60 State=UP
EOF
    # Version 22.05 loads a cgroup plugin in any case ("disabled" came later): name one and constrain nothing.
    printf '%s\n' CgroupPlugin=cgroup/v1 CgroupAutomount=no ConstrainCores=no ConstrainRAMSpace=no ConstrainDevices=no >"$dir/cgroup.conf"
}

port_in_use() { # any of the ports of the controller and the nodes
    local port
    for port in $(seq "$base_port" $((base_port + nodes))); do
        ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return 0
    done
    return 1
}

all_idle() { [ "$(sinfo -h -N -o %T | grep -c '^idle$')" = "$nodes" ]; }

up() {
    for program in munged slurmctld slurmd sinfo; do
        command -v "$program" >/dev/null || fail "$program is missing. On Debian: apt-get install slurmctld slurmd slurm-client munge"
    done
    [ ! -e "$dir/slurm.conf" ] || fail "$dir is in use: stop it with down"
    while port_in_use; do base_port=$((base_port + 64)); done
    mkdir -p "$dir/state"
    chmod 755 "$dir"
    for number in $(seq "$nodes"); do mkdir -p "$dir/spool-node$number"; done
    write_configuration
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    export SLURM_CONF=$dir/slurm.conf
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
    wait_for 10 munged munge --socket="$dir/munge.sock" --no-input
    slurmctld -c -i
    wait_for 20 slurmctld sinfo -h
    for number in $(seq "$nodes"); do slurmd -c -N "node$number"; done
    wait_for 20 "one of the nodes" all_idle
    echo "export SLURM_CONF=$dir/slurm.conf"
}

no_jobs() { [ -z "$(squeue -h)" ]; }

down() { # only what `up` started, by the numbers it wrote down
    local file pid
    if [ -f "$dir/slurmctld.pid" ]; then # the jobs first: their slurmstepd would wait for the controller for ever
        export SLURM_CONF=$dir/slurm.conf
        squeue -h -o %A | xargs -r scancel
        wait_for 30 "the end of all jobs" no_jobs
    fi
    for file in "$dir"/slurmd-*.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        ! kill -0 "$pid" 2>/dev/null || echo "local_cluster: process $pid ($file) is still there" >&2
    done
    rm -rf "$dir"
}

action=${1:-}
dir=${2:-}
nodes=${3:-2}
# By the process, so that two clusters may run at the same time; below 20000, where the ports of jobs begin (train.sbatch), which follow
# from their ids.
base_port=$((10000 + $$ % 150 * 64))
[[ $dir = /* ]] || fail "usage: bash tools/slurm/local_cluster.sh up|down DIR [N], DIR absolute"
case $action in
    up | down) "$action" ;;
    *) fail "unknown action '$action': up or down" ;;
esac
