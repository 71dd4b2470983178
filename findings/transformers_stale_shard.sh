#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0, safetensors 0.8.0): of a tensor that two shards of a checkpoint hold,
# from_pretrained takes the one of the last file, whatever model.safetensors.index.json says.
# The index names the first shard for model.embed_tokens.weight; a leftover of an earlier save, all 0.5, is in the last.
# Seen:
#   the index names model-00001-of-00004.safetensors; loaded: the leftover of model-00004-of-00004.safetensors
# What follows: a reader that obeys the index gives other logits than transformers for such a folder; no warning tells.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 safetensors==0.8.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" - "$work/model" <<'PY'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
name, last = "model.embed_tokens.weight", max(index.values())
own = load_file(folder / index[name])[name]
tensors = load_file(folder / last)
tensors[name] = torch.full_like(own, 0.5)
save_file(tensors, folder / last, {"format": "pt"})
loaded = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight
is_stale = bool((loaded == 0.5).all())
print(f"the index names {index[name]}; loaded: " + (f"the leftover of {last}" if is_stale else "that of the index"))
if not is_stale:
    print("changed: the index decides")
    sys.exit(1)
PY
