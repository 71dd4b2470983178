#!/usr/bin/env bash
# A `rope_theta` of OLMo 3 reaches only the layers without a window in transformers 5.
#
# transformers 4 writes one `rope_theta` into config.json, and rotates every layer by it. transformers 5.24.0
# makes a table of two rotations of it: it takes the field out of the arguments for the layers of full
# attention, and for the layers with a window it looks for it again, does not find it, and uses 500000.
# Three of four layers have a window. Published OLMo 3 has 500000, so that only a model trained with
# another base is read wrongly, without a warning.
#
# Seen:
#   full_attention: 10000.0
#   sliding_attention: 500000.0
#
# It follows: a reference for such a folder is loaded with `rope_parameters` of both kinds of layers.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q transformers==5.24.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

from transformers import Olmo3Config

config = Olmo3Config.from_dict({"model_type": "olmo3", "num_hidden_layers": 4, "rope_theta": 1e4})
found = {kind: config.rope_parameters[kind]["rope_theta"] for kind in sorted(set(config.layer_types))}
for kind, theta in found.items():
    print(f"{kind}: {theta}")
changed = found != {"full_attention": 1e4, "sliding_attention": 5e5}
if changed:
    print("changed: only the layers of full attention had the field's base")
sys.exit(changed)
PYTHON
