#!/usr/bin/env bash
# Eager attention of transformers 5 adds the ALiBi of Falcon twice; sdpa, the default, adds it once.
#
# Falcon's first small models (falcon-rw-1b, falcon-rw-7b) have `alibi: true`. In transformers 5.24.0
# (torch 2.13.0) the model puts ALiBi into the attention mask, and the eager attention of a layer adds it to
# the scores again before it adds that mask. The two implementations give one model different logits, and
# only sdpa's are those of the released model.
#
# Seen:
#   alibi: eager differs from sdpa by 12.5888%
#   no alibi: eager differs from sdpa by 0.0001%
#
# It follows: a reference for Falcon is loaded with attn_implementation="sdpa", although eager is the usual
# choice for exact comparisons.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

found = {}
for alibi in (True, False):
    config = transformers.FalconConfig(
        vocab_size=101,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        alibi=alibi,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        initializer_range=0.3,
    )
    logits = {}
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            logits[attention] = model.eval()(torch.arange(20)[None]).logits
    eager, sdpa = logits["eager"], logits["sdpa"]
    found[alibi] = ((eager - sdpa).norm() / sdpa.norm()).item()
    print(f"{'alibi' if alibi else 'no alibi'}: eager differs from sdpa by {found[alibi]:.4%}")
changed = found[True] < 0.05 or found[False] > 1e-4
if changed:
    print("changed: only with ALiBi did eager differ")
sys.exit(changed)
PYTHON
