#!/usr/bin/env bash
# A Phi-3 prompt has other logits when a longer one is in its batch, in transformers 5.
#
# Models with longrope (Phi-3, Phi-3.5, Phi-4-mini) have short and long factors for their rotation. In
# transformers 5.24.0 (torch 2.13.0) the longest sequence of a batch chooses for all of them: a prompt within
# the original context is rotated with short factors alone, and with long ones where any other prompt of
# the batch is longer than it. Its logits, and so its answer, depend on its neighbours; that is no padding
# effect, since without a neighbour of such a length the same padded batch gives the same logits.
#
# Seen (difference of the short prompt's logits from those that it has alone):
#   beside a prompt within the original context: 0.0000 (below 0.001)
#   beside a longer prompt: 0.5228 (above 0.01)
#
# It follows: a server that batches has to choose the factors by the request or by its longest context, and
# is compared with transformers one prompt at a time.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

ORIGINAL = 16
config = transformers.Phi3Config(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    pad_token_id=0,
    max_position_embeddings=64,
    original_max_position_embeddings=ORIGINAL,
    initializer_range=0.3,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0, 1.0, 1.0, 1.0],
        long_factor=[1.2, 2.5, 4.0, 9.0],
        partial_rotary_factor=1.0,
    ),
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
short = torch.arange(1, 11)


def logits(other_length):
    """Return the short prompt's logits, alone or to the left of padding beside another prompt."""
    batch, mask = short[None], torch.ones(1, len(short), dtype=torch.long)
    if other_length:
        batch = torch.zeros(2, other_length, dtype=torch.long)
        mask = torch.zeros_like(batch)
        batch[0, : len(short)], mask[0, : len(short)] = short, 1
        batch[1], mask[1] = torch.arange(other_length) % 90 + 1, 1
    with torch.no_grad():
        return model(batch, attention_mask=mask).logits[0, : len(short)]


alone = logits(0)
within, beyond = (
    ((logits(length) - alone).norm() / alone.norm()).item() for length in (ORIGINAL - 2, 40)
)
print(f"beside a prompt within the original context: {within:.4f}")
print(f"beside a longer prompt: {beyond:.4f}")
changed = within > 1e-3 or beyond < 1e-2
if changed:
    print("changed: only the longer prompt made a difference")
sys.exit(changed)
PYTHON
