#!/usr/bin/env bash
# Runs a command on every task of a SLURM job, as one job of jaxserve, with one task per GPU:
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gres=gpu:8 scripts/launch_slurm.sh \
#       jaxserve generate --tensor-parallel 16 --output answers.jsonl "Why is the sky blue?"
#
# Every task must see all GPUs of its node, so pass --gres and not --gpus-per-task: JAX takes the
# GPU with the task's number. The processes find one another by SLURM's variables.

#SBATCH --job-name=jaxserve

set -u
if (($# < 1)); then
    echo "usage: sbatch [SLURM options] $0 COMMAND..." >&2
    exit 2
fi
exec srun --kill-on-bad-exit=1 "$@"
