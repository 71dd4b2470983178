#!/usr/bin/env bash
# `use_sliding_window: false` does not switch off the windows of SmolLM3 in transformers 5.
#
# With `layer_types` that name sliding attention, a layer of SmolLM3 in transformers 5.24.0 (torch 2.13.0) takes
# its mask by `layer_types` alone. `use_sliding_window` only decides about the number that a layer hands to
# its attention implementation, which eager and sdpa ignore, and flash attention uses in place of the mask.
# So the field changes nothing with eager and sdpa, which slide whatever it says.
#
# Seen (relative differences of logits from those with true: with false, and of a model without windows):
#   eager: false 0.0000, no windows 1.0838
#   sdpa: false 0.0000, no windows 1.0838
#
# It follows: SmolLM3's windows are those of `layer_types`; the field is read only where these are missing.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

WINDOWS = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])


def logits(attention, **fields):
    config = transformers.SmolLM3Config(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=None,
        initializer_range=0.3,
        **fields,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None]).logits


changed = False
for attention in ("eager", "sdpa"):
    on = logits(attention, use_sliding_window=True, **WINDOWS)
    off = logits(attention, use_sliding_window=False, **WINDOWS)
    none = logits(attention)
    off, none = (((each - on).norm() / on.norm()).item() for each in (off, none))
    print(f"{attention}: false {off:.4f}, no windows {none:.4f}")
    changed |= off != 0 or none < 0.1
if changed:
    print("changed: the field made no difference")
sys.exit(changed)
PYTHON
