"""The norm of a fused product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import jax
from jaxtyping import Array, Float


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RMSScale:
    """The arguments of `rms_norm` except its input."""

    scale: Float[Array, " in"]
    eps: float = field(metadata=dict(static=True))
    offset: float = field(default=0.0, metadata=dict(static=True))
