#!/usr/bin/env bash
# transformers 5.24.0 drops the rotary scaling of every GGUF file that it reads, and fails on gpt-oss's.
#
# GGUF files state the scaling of the rotary embedding in `ARCH.rope.scaling.*` (YaRN, linear) or in a
# tensor, `rope_freqs.weight` (Llama 3.1 and later) and `rope_factors_*.weight` (longrope). transformers
# 5.24.0 (gguf 0.19.0) reads neither for llama, qwen2, qwen3, qwen3moe, gemma3 and phi3: the model has plain
# rotation, without a warning, and other logits than the folder that the file was made of. For gpt-oss,
# whose files all have YaRN, it has code of its own, which takes the length of the key's name for the value
# and raises TypeError: no real gpt-oss file can be read, although the architecture is listed as supported.
#
# Seen:
#   llama: {'rope_theta': 500000.0}        (likewise qwen2, qwen3, qwen3moe, gemma3, phi3)
#   llama with rope_freqs.weight: {'rope_theta': 500000.0}
#   gpt-oss: TypeError
#
# It follows: transformers is no reference for a GGUF file with scaled rotation; the folder, or llama.cpp, is.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0
cd "$here"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error env/bin/python - <<'PYTHON'
import sys

import gguf
import numpy as np
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def rotation(arch, *, has_table=False):
    writer = gguf.GGUFWriter("model.gguf", arch)
    writer.add_block_count(1)
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(8)
    if has_table:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32))
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
    writer.add_tensor("output.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        config = load_gguf_checkpoint("model.gguf")["config"]
    except TypeError:
        return "TypeError"
    return str({name: value for name, value in config.items() if "rope" in name})


PLAIN = "{'rope_theta': 500000.0}"
found = {arch: rotation(arch) for arch in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3")}
found["llama with rope_freqs.weight"] = rotation("llama", has_table=True)
expected = dict.fromkeys(found, PLAIN) | {"gpt-oss": "TypeError"}
found["gpt-oss"] = rotation("gpt-oss")
for name, text in found.items():
    print(f"{name}: {text}" + ("" if text == expected[name] else f"   changed, was {expected[name]}"))
sys.exit(found != expected)
PYTHON
