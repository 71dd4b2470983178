#!/usr/bin/env bash
# jax.random.categorical of bfloat16 logits draws from another distribution: low ids, and likely tokens only.
#
# `categorical(key, logits)` adds Gumbel noise and takes the largest. In jax 0.10.2 the noise has the dtype of
# the logits: 8 random bits for bfloat16, so that it has 128 values, of at most 4.84, and 1,024 of at most 6.93
# for float16. A token that is far enough behind is never drawn, however many such tokens there are, and of
# equals the one of the lowest id is taken. The docstring speaks of float32 and probabilities below 1e-7.
# With `mode="high"` bfloat16 has more values, and still prefers low ids.
#
# Seen (300 draws of 32,768 equally likely ids; 2,000 draws where one token has 0.9 and 1,000 others 0.1):
#   float32: median id 16962, largest 32547; the likely token 0.910
#   float16: median id 720, largest 6252; the likely token 1.000
#   bfloat16: median id 82, largest 683; the likely token 0.991
#   bfloat16, mode="high": median id 9825, largest 32692; the likely token 0.867
#
# It follows: logits are cast to float32 before they are drawn from. A model that computes in bfloat16, and a
# loop that draws from its outputs as they are, gives answers that look plausible and are greedier than asked for.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$here/env/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np


def draws(key, probabilities, count, dtype, mode):
    logits = jnp.asarray(np.log(probabilities), dtype)
    return np.asarray(jax.random.categorical(jax.random.key(key), logits, shape=(count,), mode=mode))


LIKELY = 1000
even = np.full(32768, 1.0)
uneven = np.full(LIKELY + 1, 0.1 / LIKELY)
uneven[LIKELY] = 0.9
found = {}
for dtype, mode in [("float32", "low"), ("float16", "low"), ("bfloat16", "low"), ("bfloat16", "high")]:
    ids = draws(0, even, 300, dtype, mode)
    share = np.mean(draws(1, uneven, 2000, dtype, mode) == LIKELY)
    found[dtype, mode] = np.median(ids), share
    name = dtype if mode == "low" else f'{dtype}, mode="high"'
    print(f"{name}: median id {np.median(ids):.0f}, largest {ids.max()}; the likely token {share:.3f}")
median, share = found["float32", "low"]
changed = not (14000 < median < 19000 and 0.87 < share < 0.93)
median, share = found["bfloat16", "low"]
changed |= median > 1000 or share < 0.97
if changed:
    print("changed: bfloat16 was drawn from other tokens than float32")
sys.exit(bool(changed))
PYTHON
