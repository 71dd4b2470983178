"""Operations without products on each row: norms, gated activations and log-sum-exp."""

from jaxserve.kernels.pointwise.api import (
    gated_silu,
    layer_norm,
    log_sum_exp,
    rms_norm,
    row_maximum,
)

__all__ = ["gated_silu", "layer_norm", "log_sum_exp", "rms_norm", "row_maximum"]
