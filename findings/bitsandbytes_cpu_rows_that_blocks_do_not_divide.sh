#!/usr/bin/env bash
# bitsandbytes 0.50.2 decodes NF4 wrongly on CPUs where blocks do not divide a row, without an error.
#
# A block of NF4 is 64 consecutive numbers of the flattened matrix, and may go from one row to the next.
# `quantize_4bit` does that on every device. On a CPU (torch 2.13.0), `dequantize_4bit` gives other numbers
# as soon as the length of a row is no multiple of the block: errors are as large as the numbers
# themselves. Decoding the same bytes by the format (table of 16 numbers, times the scale of each 64) gives
# the quantised matrix back, so that the stored weights are right and only CPU decoding is not.
#
# Seen (largest error over the largest number of a 24-row matrix):
#   128 columns: library 0.09, by the format 0.09
#   96 columns: library 0.38, by the format 0.12
#   160 columns: library 0.37, by the format 0.10
#
# It follows: a reader of such folders is tested against the bytes, or against rows of whole blocks.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2
"$here/env/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import bitsandbytes.functional as functional
import torch

torch.manual_seed(0)
changed = False
for columns in (128, 96, 160):
    weight = torch.randn(24, columns)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    octets = packed.reshape(-1)
    codes = torch.stack([octets >> 4, octets & 15], 1).reshape(-1).long()
    scales = state.absmax.repeat_interleave(64)[: codes.numel()]
    by_format = (state.code[codes] * scales).reshape(weight.shape)
    library = functional.dequantize_4bit(packed, state)
    errors = [((each - weight).abs().max() / weight.abs().max()).item() for each in (library, by_format)]
    print(f"{columns} columns: library {errors[0]:.2f}, by the format {errors[1]:.2f}")
    is_wrong = errors[0] > 2 * errors[1]
    changed |= is_wrong != (columns % 64 != 0)
if changed:
    print("changed: only rows that blocks do not divide were decoded wrongly")
sys.exit(changed)
PYTHON
