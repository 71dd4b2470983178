#!/usr/bin/env bash
# Runs a command as one process on each of several hosts that work as one job. Run it on the first
# host. It starts process 0 there and the others over ssh, in this folder, which must exist on all:
#
#   scripts/launch_multihost.sh node1,node2 jaxserve generate --tensor-parallel 16 "Hello"
#
# node1 is the name by which the others reach this host, on port JAXSERVE_PORT (8476). A process
# uses all GPUs of its host. Variables that begin with JAX, XLA, NCCL or CUDA, and PATH and
# PYTHONPATH, are passed on.

set -u
if (($# < 2)); then
    echo "usage: $0 HOST,HOST... COMMAND..." >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

IFS=, read -ra hosts <<<"$1"
shift
export JAXSERVE_COORDINATOR=${hosts[0]}:${JAXSERVE_PORT:-8476}
export JAXSERVE_NUM_PROCESSES=${#hosts[@]}
variables=(PATH="$PATH" PYTHONPATH="${PYTHONPATH:-}")
for name in "${!JAX@}" "${!XLA@}" "${!NCCL@}" "${!CUDA@}"; do
    variables+=("$name=${!name}")
done
start 0 env JAXSERVE_PROCESS_ID=0 "$@"
for ((i = 1; i < ${#hosts[@]}; i++)); do
    remote=$(printf '%q ' env "${variables[@]}" JAXSERVE_PROCESS_ID="$i" "$@")
    start "$i" "${SSH:-ssh}" -o BatchMode=yes "${hosts[i]}" "cd $(printf %q "$PWD") && exec $remote"
done
finish
