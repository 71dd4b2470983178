#!/usr/bin/env bash
# Measures the policies of docs/results/policies.md again, on an idle machine: about 25 minutes on two
# cores, 5 of them for compilation in the first run. Estimates are beside the commands.
#
#   scripts/measure_policies.sh PREDICTOR
#
# PREDICTOR is a folder made by
#   jaxserve predictor train sharegpt --output PREDICTOR --max-examples 5000 --epochs 3 \
#       --max-prompt-tokens 64 --held-out 0.15
# which takes about 8 minutes and does not need an idle machine. PYTHON=... sets the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
predictor=${1:?give the folder of a predictor, see the head of this script}
python=${PYTHON:-.venv/bin/python}
sharegpt=(--workload sharegpt --output-scale 0.25 --output-tokens 256 --max-prompt-tokens 128
    --held-out --max-context 512 --repeats 3)

measure() { # NAME COMMAND OPTIONS...
    local name=$1 command=$2
    shift 2
    echo "---- $name" >&2
    "$python" -m "benchmarks.$command" "${sharegpt[@]}" "$@" \
        --output "benchmarks/results/${name}_smollm2_cpu.json" > /dev/null
}

s3=(policies --policies orca,vllm_like,s3,s3_oracle,auto --predictor "$predictor" --unlimited
    --num-requests 64 --max-slots 64)
# Pools with which ORCA runs 4, 21 and all answers at once.
measure policies_s3_tight "${s3[@]}" --kv-memory 96MB     # 8 minutes: 97 s a round, ORCA 36 of them
measure policies_s3_middle "${s3[@]}" --kv-memory 500MB   # 5 minutes
measure policies_s3_wide "${s3[@]}" --kv-memory 4700MB    # 5 minutes
measure policies_sharegpt policies --num-requests 48 --max-slots 16 \
    --policies fastertransformer,orca,vllm_like,flover    # 4 minutes
measure simulate_sharegpt planning.simulate --num-requests 48 --max-slots 16 --repeats 2 \
    --policies fastertransformer,orca,vllm_like           # 3 minutes
"$python" -m benchmarks.figures
