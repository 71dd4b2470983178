"""FlashInfer's wrappers for paged caches, where it is installed."""

from __future__ import annotations

import importlib
from typing import final

import torch

from benchmarks.kernels.peers.case import Case
from benchmarks.kernels.peers.timing import Attend

_WORKSPACE_BYTES = 512 << 20


@final
class FlashInfer:
    """`BatchDecodeWithPagedKVCacheWrapper`, and `BatchPrefillWithPagedKVCacheWrapper`.

    Attributes:
      page_size: as in our runtime.
    """

    page_size = 32
    package = "flashinfer"

    def prepare(self, case: Case) -> Attend:
        """Plan once, and return the call that runs the plan."""
        package = importlib.import_module(self.package)
        device, dtype = case.q.device, case.q.dtype
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        shape = case.shape
        pages = (case.page_starts, case.pages_in_order, case.last_page_lengths)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, case.page_size)
        if shape.is_decode:
            # As its documentation advises for grouped queries.
            is_grouped = shape.num_heads >= 4 * shape.num_kv_heads
            wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=is_grouped
            )
            wrapper.plan(*pages, *heads, q_data_type=dtype, kv_data_type=dtype)
        else:
            wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                *(case.query_starts, *pages, *heads),
                causal=True,
                q_data_type=dtype,
                kv_data_type=dtype,
            )

        def attend(layer: int) -> torch.Tensor:
            return wrapper.run(case.q, (case.k_pages[layer], case.v_pages[layer]))

        return attend
