#!/usr/bin/env bash
# Mamba's outputs have `past_key_values`, and its forward ignores them without a word, in transformers 5.
#
# Code for any causal model goes on with `model(token, past_key_values=out.past_key_values)`. In transformers
# 5.24.0 (torch 2.13.0) the outputs of Mamba, Mamba 2 and Falcon-Mamba have this attribute, which is the cache.
# Their forward calls its argument `cache`, and takes `past_key_values` among its other keyword arguments, where
# nobody reads it: every token is computed as the first one. The older name, `cache_params`, is taken, with a
# warning. Jamba, with layers of the same kind, takes `past_key_values` as other models do.
#
# Seen (relative difference of the logits of 17 tokens, one by one after a cache of 20, from those of the whole):
#   mamba past_key_values: 0.7874, cache: 0.0000; the attribute is the cache: True
#   mamba2 past_key_values: 1.1389, cache: 0.0000; the attribute is the cache: True
#   falcon_mamba past_key_values: 0.8387, cache: 0.0000; the attribute is the cache: True
#
# It follows: a reference for recurrent models is whole prompts, or `generate`.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
import transformers

KINDS = {
    "mamba": {},
    "mamba2": dict(num_heads=6, head_dim=16, n_groups=2),
    "falcon_mamba": {},
}
HEAD, NUM = 20, 37
tokens = (torch.arange(NUM) * 7 % 90 + 3)[None]
is_as_stated = True
for kind, fields in KINDS.items():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=101, hidden_size=48, num_hidden_layers=2, state_size=8, **fields
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.15)
    errors = []
    with torch.no_grad():
        whole = model(tokens).logits[:, HEAD:]
        for name in ("past_key_values", "cache"):
            out = model(tokens[:, :HEAD], use_cache=True)
            is_cache = out.past_key_values is out.cache
            found = []
            for i in range(HEAD, NUM):
                out = model(tokens[:, i : i + 1], use_cache=True, **{name: out.past_key_values})
                found.append(out.logits)
            errors.append(((torch.cat(found, 1) - whole).norm() / whole.norm()).item())
    print(
        f"{kind} past_key_values: {errors[0]:.4f}, cache: {errors[1]:.4f}; "
        f"the attribute is the cache: {is_cache}"
    )
    is_as_stated &= errors[0] > 0.1 and errors[1] < 1e-4 and is_cache
if not is_as_stated:
    print("changed: past_key_values is taken, refused or gone")
    sys.exit(1)
PYTHON
