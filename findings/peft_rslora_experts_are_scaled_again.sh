#!/usr/bin/env bash
# PEFT scales an rsLoRA of experts by the root of 2 too much if transformers has fused their matrices.
#
# transformers 5 keeps the gate and up matrices of a mixture's experts as one, and PEFT 0.21.2 converts adapters
# that were trained with transformers 4 when it loads them: the fused matrix gets twice the rank, and twice
# `lora_alpha`, so that alpha / r stays. With `use_rslora` the scale is alpha / sqrt(r), which grows by the root of
# 2 (transformers 5.24.0, torch 2.13.0). There is no warning, and `merge_and_unload` writes such weights.
#
# Seen (logits of a Mixtral with an adapter for w1, w2 and w3 of its experts; relative difference from those of
# W + scale * B @ A):
#   LoRA: 0.0000
#   rsLoRA: 0.2388, and from those with root 2 times the scale in w1 and w3: 0.0000
#
# It follows: such an adapter is merged with transformers 4, or expert by expert with its own scale.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2 safetensors==0.8.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" -W ignore - "$here" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from safetensors.torch import save_file

RANK, ALPHA, EXPERTS, HIDDEN, INNER = 4, 8, 4, 48, 80
SHAPES = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
config = transformers.MixtralConfig(
    vocab_size=101,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=6,
    num_local_experts=EXPERTS,
)
torch.manual_seed(0)
products, tensors = {}, {}
for expert in range(EXPERTS):
    for name, (rows, columns) in SHAPES.items():
        a, b = 0.1 * torch.randn(RANK, columns), 0.1 * torch.randn(rows, RANK)
        products[name, expert] = b @ a
        module = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b


def base():
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(config).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def merged(scale, fused_scale):
    model = base()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for expert in range(EXPERTS):
            gate_and_up = torch.cat([products["w1", expert], products["w3", expert]])
            experts.gate_up_proj[expert] += fused_scale * gate_and_up
            experts.down_proj[expert] += scale * products["w2", expert]
    return logits(model)


def loaded(rslora):
    folder = Path(sys.argv[1], f"adapter-{rslora}")
    folder.mkdir()
    settings = dict(peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA)
    settings.update(use_rslora=rslora, target_modules=["w1", "w2", "w3"], inference_mode=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return logits(PeftModel.from_pretrained(base(), folder))


def difference(found, right):
    return ((found - right).norm() / right.norm()).item()


plain = difference(loaded(False), merged(ALPHA / RANK, ALPHA / RANK))
scale = ALPHA / RANK**0.5
found = loaded(True)
rooted, again = difference(found, merged(scale, scale)), difference(found, merged(scale, 2**0.5 * scale))
print(f"LoRA: {plain:.4f}")
print(f"rsLoRA: {rooted:.4f}, and from those with root 2 times the scale in w1 and w3: {again:.4f}")
changed = plain > 1e-4 or rooted < 1e-3 or again > 1e-4
if changed:
    print("changed: the rsLoRA has another scale")
sys.exit(changed)
PYTHON
