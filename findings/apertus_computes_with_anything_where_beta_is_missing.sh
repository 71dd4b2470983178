#!/usr/bin/env bash
# An Apertus checkpoint without the buffers of its activation loads, and computes with arbitrary numbers.
#
# xIELU's `beta` and `eps` are constants of the architecture (0.5 and -1e-6), which the constructor sets and no
# option changes. transformers 5.24.0 (torch 2.13.0) keeps them as persistent buffers, builds models on the meta
# device, and initialises only what its initialisation knows: of a checkpoint that lacks them, as one that
# another tool has written from the parameters alone does, each layer gets what its memory happened to hold. A
# line says MISSING, "newly initialized", as for a head that is to be trained.
#
# Seen (beta and eps of two layers; the difference of logits, relative to those of the same weights):
#   [0.5, -1e-06, 0.5, -1e-06] as written, 0.000
#   [-0.218, 0.0, 0.0, 0.0], or [-1.48e+25, 1.18e-38, ...], another in every process, without them, 0.5 to 1
#
# It follows: who writes an Apertus folder writes both for every layer.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - "$here" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

folder = Path(sys.argv[1], "model")
config = transformers.ApertusConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=None,
    max_position_embeddings=16384,
)
torch.manual_seed(0)
model = transformers.ApertusForCausalLM(config).eval()
model.save_pretrained(folder)
file = folder / "model.safetensors"
tensors = load_file(file)


def loaded(kept):
    save_file({n: t for n, t in tensors.items() if kept(n)}, file, metadata={"format": "pt"})
    again = transformers.ApertusForCausalLM.from_pretrained(folder).eval()
    numbers = [b.item() for n, b in again.named_buffers() if n.endswith(("act_fn.beta", "act_fn.eps"))]
    with torch.no_grad():
        one, other = (each(torch.arange(10)[None]).logits for each in (model, again))
    difference = ((one - other).norm() / one.norm()).item()
    print([float(f"{number:.3g}") for number in numbers], f"{difference:.3f}")
    return numbers


whole = loaded(lambda name: True)
without = loaded(lambda name: not name.endswith(("act_fn.beta", "act_fn.eps")))
changed = whole != [0.5, -9.999999974752427e-07] * 2 or whole == without
if changed:
    print("changed: the missing constants have their values")
sys.exit(changed)
PYTHON
