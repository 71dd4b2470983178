"""PyTorch's scaled dot product attention over dense keys and values: no page tables."""

from __future__ import annotations

from typing import final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.peers.case import Case
from benchmarks.kernels.peers.timing import Attend


@final
class Dense:
    """A backend of it: "flash" (FlashAttention-2) or "cudnn".

    Attributes:
      page_size: of the pages that dense keys are laid out from.
    """

    page_size = 128
    package = "torch"

    def __init__(self, backend: str):
        self._backends = [
            {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]
        ]

    def prepare(self, case: Case) -> Attend:
        """Return the call to time. Raises NotImplementedError for a shape that it cannot serve."""
        shape = case.shape
        queries, context = shape.rows[0]
        if len(set(shape.rows)) > 1 or not (queries == 1 or queries == context):
            raise NotImplementedError("dense: it serves contexts of one length, and whole prompts")
        batch = len(shape.rows)
        # [batch, heads, queries, head_dim]
        q = case.q.unflatten(0, (batch, queries)).transpose(1, 2)
        table = case.page_table.long()

        def dense(pages: torch.Tensor) -> torch.Tensor:
            return pages[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()

        keys, values = (list(map(dense, pages)) for pages in (case.k_pages, case.v_pages))

        def attend(layer: int) -> torch.Tensor:
            with sdpa_kernel(self._backends):
                out = scaled_dot_product_attention(
                    q, keys[layer], values[layer], is_causal=queries > 1, enable_gqa=True
                )
            return out.transpose(1, 2).flatten(0, 1)

        return attend
