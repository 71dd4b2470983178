#!/usr/bin/env bash
# Llama 4 cannot be called with text alone through its own class in transformers 5.24.0.
#
# `Llama4ForConditionalGeneration` is the architecture that Llama 4's folders name. Its forward reads a field
# of images from the output of its text model (transformers 5.24.0, torch 2.13.0) and raises AttributeError
# for a prompt without images. The text model's class, `Llama4ForCausalLM`, has the same weights and works.
#
# Seen:
#   Llama4ForConditionalGeneration: AttributeError
#   Llama4ForCausalLM: logits of shape (1, 4, 101)
#
# It follows: the reference for Llama 4's text is `Llama4ForCausalLM` on `text_config`.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 pillow
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

text = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=32,
    intermediate_size_mlp=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=2,
    pad_token_id=0,
)
vision = dict(
    hidden_size=16,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    vision_output_dim=16,
    projector_input_dim=16,
    projector_output_dim=16,
)
config = transformers.Llama4Config(text_config=text, vision_config=vision)
models = {
    "Llama4ForConditionalGeneration": lambda: transformers.Llama4ForConditionalGeneration(config),
    "Llama4ForCausalLM": lambda: transformers.Llama4ForCausalLM(config.text_config),
}
seen = {}
for name, make in models.items():
    model = make().eval()
    try:
        with torch.no_grad():
            shape = tuple(model(torch.tensor([[5, 7, 9, 11]])).logits.shape)
        seen[name] = f"logits of shape {shape}"
    except AttributeError:
        seen[name] = "AttributeError"
    print(f"{name}: {seen[name]}")
expected = dict(zip(models, ["AttributeError", "logits of shape (1, 4, 101)"]))
if seen != expected:
    print(f"changed, was {expected}")
sys.exit(seen != expected)
PYTHON
