#!/usr/bin/env bash
# A loop that decodes Bamba with a cache rotates every token as the first one, in transformers 5.
#
# The usual loop is `out = model(token, past_key_values=out.past_key_values)`. Models find the position of the
# token in the cache. In transformers 5.24.0 (torch 2.13.0) Bamba does not: without `position_ids` the positions
# of each call begin at 0, whatever the cache holds, so that keys and queries of all new tokens are rotated
# alike. There is no warning, and `generate`, which passes positions, is right. Falcon-H1 and Granite 4
# hybrids, whose code is Bamba's in most parts, count on.
#
# Seen (relative difference of the logits of 17 tokens after a cache of 20 from those of the whole prompt):
#   bamba: 0.0939, with position_ids: 0.0000
#   falcon_h1: 0.0000, with position_ids: 0.0000
#   granitemoehybrid: 0.0000, with position_ids: 0.0000
#
# It follows: a comparison with transformers passes `position_ids`, or compares with whole prompts.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
import transformers

SIZES = dict(
    vocab_size=101,
    hidden_size=48,
    num_hidden_layers=2,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=2,
    pad_token_id=0,
)
KINDS = {
    "bamba": dict(attn_layer_indices=[1]),
    "falcon_h1": dict(mamba_d_ssm=96),
    "granitemoehybrid": dict(
        layer_types=["mamba", "attention"],
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=80,
    ),
}
HEAD, NUM = 20, 37
tokens = (torch.arange(NUM) * 7 % 90 + 3)[None]
is_as_stated = True
for kind, fields in KINDS.items():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.15)
    errors = []
    with torch.no_grad():
        whole = model(tokens).logits[:, HEAD:]
        for given in ({}, {"position_ids": torch.arange(HEAD, NUM)[None]}):
            cache = model(tokens[:, :HEAD], use_cache=True).past_key_values
            assert cache.get_seq_length() == HEAD
            found = model(tokens[:, HEAD:], past_key_values=cache, **given).logits
            errors.append(((found - whole).norm() / whole.norm()).item())
    print(f"{kind}: {errors[0]:.4f}, with position_ids: {errors[1]:.4f}")
    is_as_stated &= errors[1] < 1e-4 and (errors[0] > 1e-2) == (kind == "bamba")
if not is_as_stated:
    print("changed: Bamba counts on from its cache, or another model does not")
    sys.exit(1)
PYTHON
