#!/usr/bin/env bash
# Runs a command as N processes on this machine that work as one job, for example
#
#   scripts/launch_local.sh 2 jaxserve generate --tensor-parallel 2 "Why is the sky blue?"
#
# Process 0 leads and answers. Each process gets one GPU, or a CPU device; Ctrl-C goes to process 0.
# Exits with 0 if all processes do. No process remains.

set -u
if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 NUM_PROCESSES COMMAND..." >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

num_processes=$1
shift
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=$("${PYTHON:-python3}" -c "$free_port") || exit 1
export JAXSERVE_COORDINATOR=127.0.0.1:$port JAXSERVE_NUM_PROCESSES=$num_processes
for ((i = 0; i < num_processes; i++)); do
    start "$i" env JAXSERVE_PROCESS_ID="$i" JAX_LOCAL_DEVICE_IDS="$i" "$@"
done
finish
