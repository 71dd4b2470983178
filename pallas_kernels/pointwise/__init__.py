"""Operations without products on each row: norms and gated activations."""

from pallas_kernels.pointwise.api import gated_silu, rms_norm

__all__ = ["gated_silu", "rms_norm"]
