#!/usr/bin/env bash
# One gradient with a NaN ends all training for good if optax.MultiSteps wraps optax.apply_if_finite.
#
# apply_if_finite is there to leave out such a step. In optax 0.2.8 (jax 0.10.2) `MultiSteps(apply_if_finite(...), k)`,
# which accumulates k gradients for a step, empties its accumulator by a product with 0, and 0 * NaN is NaN: the
# step of these k gradients is left out, and so is every later one, whose gradients are finite. Parameters
# stay as they are, and losses finite. The other order, and `should_skip_update_fn`, go on.
#
# Seen (a parameter after each of 6 steps of 2 gradients; the second step has a NaN):
#   MultiSteps(apply_if_finite): 0.9 0.9 0.9 0.9 0.9 0.9
#   apply_if_finite(MultiSteps): 0.9 0.9 0.8 0.7 0.6 0.5
#   should_skip_update_fn=skip_not_finite: 0.9 0.9 0.8 0.7 0.6 0.5
#
# It follows: gradients are looked at before they are accumulated, not after.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$here/env/bin/python" - <<'PYTHON'
import sys

import jax.numpy as jnp
import optax


def trained(name, optimizer):
    value, found = jnp.ones(()), []
    state = optimizer.init(value)
    for i in range(12):
        gradient = jnp.asarray(jnp.nan if i == 3 else 1.0)
        change, state = optimizer.update(gradient, state, value)
        value = optax.apply_updates(value, change)
        found.append(round(float(value), 3))
    print(f"{name}: {' '.join(map(str, found[1::2]))}")
    return found[-1]


def steps(inner, **settings):
    return optax.MultiSteps(inner, 2, **settings).gradient_transformation()


MANY = 1000
plain = optax.sgd(0.1)
ends = [
    trained("MultiSteps(apply_if_finite)", steps(optax.apply_if_finite(plain, MANY))),
    trained("apply_if_finite(MultiSteps)", optax.apply_if_finite(steps(plain), MANY)),
    trained("should_skip_update_fn=skip_not_finite", steps(plain, should_skip_update_fn=optax.skip_not_finite)),
]
changed = ends != [0.9, 0.5, 0.5]
if changed:
    print("changed: only MultiSteps(apply_if_finite) stood still")
sys.exit(changed)
PYTHON
