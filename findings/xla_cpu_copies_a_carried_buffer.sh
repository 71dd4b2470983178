#!/usr/bin/env bash
# XLA copies a whole carried buffer in every iteration where a loop uses a slice of it in two places (CPU).
#
# A loop that reads row i of a large carried buffer, writes the row back and also returns something computed
# from it looks as if it worked in place: the buffer is donated, and `dynamic_update_slice` is the only
# write. In jaxlib 0.10.2 on CPUs the read is fused into both of its users, so that one of them still
# reads the old buffer after the write, and the compiled loop copies the whole buffer twice in each
# iteration. `lax.optimization_barrier` does not help, since it is dropped before fusion. Reading the row by
# an operation that is not fused with its users (a gather of one index) leaves no copy.
#
# Seen (copies of the buffer in the compiled loop):
#   read with dynamic_slice: 2
#   read with dynamic_slice behind an optimization_barrier: 2
#   read with a gather: 0
#
# It follows: states that are advanced row by row (recurrent layers, caches) are looked at in the compiled
# text, where `copy(` of the buffer's shape must not occur.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$here/env/bin/python" - <<'PYTHON'
import re
import sys

import jax
import jax.numpy as jnp
from jax import lax

READS = {
    "dynamic_slice": lambda buffer, i: lax.dynamic_index_in_dim(buffer, i, 0, keepdims=False),
    "dynamic_slice behind an optimization_barrier": lambda buffer, i: lax.optimization_barrier(
        lax.dynamic_index_in_dim(buffer, i, 0, keepdims=False)
    ),
    "a gather": lambda buffer, i: jnp.take(buffer, i[None], axis=0, mode="clip")[0],
}


def advance(read, buffer, inputs):
    def one(i, carry):
        buffer, sums = carry
        row = read(buffer, i)
        buffer = lax.dynamic_update_index_in_dim(buffer, row * 0.5 + inputs[i], i, 0)
        return buffer, sums.at[i].set(jnp.sum(row * inputs[i]))

    return lax.fori_loop(0, inputs.shape[0], one, (buffer, jnp.zeros(inputs.shape[0])))


shape = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)
expected = dict(zip(READS, (2, 2, 0)))
changed = False
for name, read in READS.items():
    step = jax.jit(lambda b, x, read=read: advance(read, b, x), donate_argnums=0)
    text = step.lower(shape, shape).compile().as_text()
    copies = len(re.findall(r"f32\[8,256,256\]\S* copy\(", text))
    print(f"read with {name}: {copies}" + ("" if copies == expected[name] else " (changed)"))
    changed |= copies != expected[name]
sys.exit(changed)
PYTHON
