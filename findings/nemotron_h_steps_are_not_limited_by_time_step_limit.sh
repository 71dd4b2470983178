#!/usr/bin/env bash
# Nemotron-H's `time_step_limit` limits nothing in transformers 5; `time_step_min`, an initial value, does.
#
# Mamba-2 clips its steps to `time_step_limit`, which is (0, infinity) in published configurations, and draws
# initial steps between `time_step_min` and `time_step_max`. In transformers 5.24.0 (torch 2.13.0) the layer of
# Nemotron-H clips to (time_step_min, infinity), 0.001 by default, and never reads `time_step_limit`.
# Bamba of the same release clips to it.
#
# Seen (change of the logits by a field, relative to those of the default):
#   nemotron_h time_step_limit: 0.0000
#   nemotron_h time_step_min: 0.1778
#   bamba time_step_limit: 0.2099
#
# It follows: whoever compares with transformers has a lowest step of `time_step_min` for Nemotron-H.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

SIZES = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
)
KINDS = {
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention"],
        head_dim=8,
        ssm_state_size=10,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
    ),
    "bamba": dict(
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_d_state=10,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_chunk_size=8,
    ),
}


def logits(kind, **fields):
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **KINDS[kind], **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        return model(torch.arange(5, 45)[None], use_cache=False).logits


def change(kind, **fields):
    default = logits(kind)
    return ((logits(kind, **fields) - default).norm() / default.norm()).item()


found = {
    "nemotron_h time_step_limit": change("nemotron_h", time_step_limit=(1.0, 2.0)),
    "nemotron_h time_step_min": change("nemotron_h", time_step_min=1.0),
    "bamba time_step_limit": change("bamba", time_step_limit=(1.0, 2.0)),
}
for name, share in found.items():
    print(f"{name}: {share:.4f}")
limit, lowest, bamba = found.values()
changed = limit != 0 or lowest < 0.01 or bamba < 0.01
if changed:
    print("changed: of Nemotron-H's two fields, only time_step_min changed the logits")
sys.exit(changed)
PYTHON
