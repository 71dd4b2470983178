#!/usr/bin/env bash
# Mamba-1 layers forget what came before if a prompt comes in pieces, in transformers 5; Mamba-2 layers do not.
#
# `generate(prefill_chunk_size=16)` reads a long prompt in pieces that share a cache, and a chat that goes on
# from a cache gives its new tokens in one piece. In transformers 5.24.0 (torch 2.13.0, without CUDA kernels) a
# layer of Mamba-1 takes its state from the cache for a piece of one token alone. A longer piece begins with
# empty states, without a warning, so that the answer is that of another prompt. Jamba does so in `generate`;
# Mamba and Falcon-Mamba refuse `prefill_chunk_size`, and forget if they are called with a cache. Mamba-2
# layers, in Mamba 2, Bamba and Falcon-H1, go on from their state.
#
# Seen (relative difference of the logits of the second piece from those of the whole prompt):
#   jamba pieces: 0.1313, one by one: 0.0000
#   mamba pieces: 0.0121, one by one: 0.0000
#   falcon_mamba pieces: 0.2025, one by one: 0.0000
#   mamba2 pieces: 0.0000, one by one: 0.0000
#   tokens of Jamba's answer that prefill_chunk_size=16 changes: 11 of 12
#
# It follows: whoever compares a server that computes prompts in chunks with transformers gives it whole prompts.
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
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
KINDS = {
    "jamba": dict(
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=6, head_dim=16, n_groups=2),
}
HEAD, NUM = 20, 37
tokens = (torch.arange(NUM) * 7 % 90 + 3)[None]


def made(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.15)
    return model


def after_head(model, name, size):
    """Return the logits of the tokens after the first ones, given in pieces of this size."""
    cache = model(tokens[:, :HEAD], use_cache=True).past_key_values
    pieces = tokens[:, HEAD:].split(size, 1)
    return torch.cat([model(each, use_cache=True, **{name: cache}).logits for each in pieces], 1)


is_as_stated = True
with torch.no_grad():
    for kind in KINDS:
        model = made(kind)
        name = "past_key_values" if kind == "jamba" else "cache"
        whole = model(tokens).logits[:, HEAD:]
        pieces, steps = (
            ((after_head(model, name, size) - whole).norm() / whole.norm()).item()
            for size in (NUM, 1)
        )
        print(f"{kind} pieces: {pieces:.4f}, one by one: {steps:.4f}")
        is_as_stated &= steps < 1e-4 and (pieces < 1e-4) == (kind == "mamba2")
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    model = made("jamba")
    whole = model.generate(tokens, **options)
    chunked = model.generate(tokens, prefill_chunk_size=16, **options)
    num = int((whole != chunked).sum())
    print(f"tokens of Jamba's answer that prefill_chunk_size=16 changes: {num} of 12")
if not (is_as_stated and num):
    print("changed: pieces of a prompt are as the whole prompt, or single tokens are not")
    sys.exit(1)
PYTHON
