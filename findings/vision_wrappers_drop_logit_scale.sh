#!/usr/bin/env bash
# Aya Vision and Command A Vision sample from logits that are 16 times too large in transformers 5.
#
# The text models of both, Command R7B and its kin (`cohere2`), multiply their logits by `logit_scale`
# (0.0625). In transformers 5.24.0 (torch 2.13.0) the models with images call the text model without its
# head and multiply by `lm_head` themselves, without that scale. Greedy tokens are the same, and so every
# test that compares them passes; the distribution is that of a temperature of 1/16, so that a temperature
# of 1 is almost greedy, and log-probabilities are wrong.
#
# Seen (logits over those of the text model, for the same tokens and weights):
#   aya_vision: 16.00
#   cohere2_vision: 16.00
#
# It follows: the text of such a model is compared with the text model's own class, not with the wrapper's.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

TEXT = dict(
    model_type="cohere2",
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    pad_token_id=0,
    logit_scale=0.0625,
)
VISION = dict(
    model_type="siglip_vision_model",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
KINDS = {
    "aya_vision": (transformers.AyaVisionConfig, transformers.AyaVisionForConditionalGeneration),
    "cohere2_vision": (
        transformers.Cohere2VisionConfig,
        transformers.Cohere2VisionForConditionalGeneration,
    ),
}
tokens = torch.tensor([[5, 7, 9, 11]])
changed = False
for name, (config_class, model_class) in KINDS.items():
    torch.manual_seed(0)
    config = config_class(text_config=dict(TEXT), vision_config=dict(VISION))
    wrapper = model_class(config).eval()
    text = transformers.Cohere2ForCausalLM(wrapper.config.text_config).eval()
    text.model.load_state_dict(wrapper.model.language_model.state_dict())
    text.lm_head.load_state_dict(wrapper.lm_head.state_dict())
    with torch.no_grad():
        ratio = (wrapper(tokens).logits.norm() / text(tokens).logits.norm()).item()
    print(f"{name}: {ratio:.2f}")
    changed |= abs(ratio - 16) > 0.01
if changed:
    print("changed: the ratio was 16.00")
sys.exit(changed)
PYTHON
