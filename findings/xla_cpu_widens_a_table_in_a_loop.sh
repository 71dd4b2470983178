#!/usr/bin/env bash
# Looking rows of a bfloat16 table up inside a loop makes XLA convert the whole table first (CPU).
#
# `table[rows]` of a bfloat16 table reads the rows alone, as one expects. The same expression in the body of a
# `lax.while_loop` (a decode loop that embeds the token that it has just chosen), in jaxlib 0.10.2 on CPUs: the
# lookup becomes one in float32, the conversion of the table does not depend on the loop, and is moved in front of
# it. Each call of the loop then writes and reads a copy of the table of twice its bytes. For an embedding of 49,152
# x 576, and loops of two steps of 32 sequences, that was half of the time. It is the same for one row and for many,
# and for columns. A float32 table is read in place.
#
# Seen (temporary memory, in bytes of the table):
#   bfloat16, alone: 0.0
#   bfloat16, in a loop: 2.0
#   float32, in a loop: 0.0
#
# It follows: temporaries of a compiled loop are looked at (`memory_analysis`), and embeddings in 16 bits are read
# by a kernel of one's own, or before the loop.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$here/env/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
from jax import lax

VOCAB, WIDTH = 20_000, 576


def alone(table, rows):
    return jnp.sum(table[rows].astype(jnp.float32) ** 2, -1)


def in_a_loop(table, rows):
    def step(carry):
        i, rows, total = carry
        return i + 1, (7 * rows + i) % VOCAB, total + alone(table, rows)

    start = 0, rows, jnp.zeros(rows.shape[0])
    return lax.while_loop(lambda carry: carry[0] < 10, step, start)[2]


def temporaries(function, dtype):
    table = jax.ShapeDtypeStruct((VOCAB, WIDTH), dtype)
    rows = jax.ShapeDtypeStruct((32,), jnp.int32)
    used = jax.jit(function).lower(table, rows).compile().memory_analysis().temp_size_in_bytes
    return used / (VOCAB * WIDTH * dtype.dtype.itemsize)


seen = [
    ("bfloat16, alone", temporaries(alone, jnp.bfloat16), 0),
    ("bfloat16, in a loop", temporaries(in_a_loop, jnp.bfloat16), 2),
    ("float32, in a loop", temporaries(in_a_loop, jnp.float32), 0),
]
for name, share, _ in seen:
    print(f"{name}: {share:.1f}")
changed = [name for name, share, stated in seen if abs(share - stated) > 0.1]
if changed:
    print("changed:", ", ".join(changed))
sys.exit(bool(changed))
PYTHON
