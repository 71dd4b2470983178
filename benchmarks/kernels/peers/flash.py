"""FlashAttention's own packages over pages, where they are installed."""

from __future__ import annotations

import importlib
from typing import final

import torch

from benchmarks.kernels.peers.case import Case
from benchmarks.kernels.peers.timing import Attend


@final
class FlashAttention2:
    """`flash_attn`, whose pages have 256 tokens at least."""

    page_size = 256
    package = "flash_attn"

    def prepare(self, case: Case) -> Attend:
        """Return the kernel for caches if each row has one query, else the one for ragged rows."""
        package = importlib.import_module(self.package)
        if case.shape.is_decode:
            q = case.q.unsqueeze(1)  # [batch, 1, heads, head_dim]

            def attend(layer: int) -> torch.Tensor:
                out = package.flash_attn_with_kvcache(
                    *(q, case.k_pages[layer], case.v_pages[layer]),
                    cache_seqlens=case.contexts,
                    block_table=case.page_table,
                    causal=True,
                )
                return out.squeeze(1)

            return attend
        longest = int(case.lengths.max()), int(case.contexts.max())
        starts = case.query_starts
        key_starts = torch.nn.functional.pad(case.contexts.cumsum(0, dtype=torch.int32), (1, 0))

        def attend_rows(layer: int) -> torch.Tensor:
            return package.flash_attn_varlen_func(
                *(case.q, case.k_pages[layer], case.v_pages[layer], starts, key_starts, *longest),
                causal=True,
                block_table=case.page_table,
            )

        return attend_rows


@final
class FlashAttention3:
    """`flash_attn_interface`, FlashAttention-3's."""

    page_size = 128
    package = "flash_attn_interface"

    def prepare(self, case: Case) -> Attend:
        """Return the kernel for ragged rows over pages, which serves every shape."""
        package = importlib.import_module(self.package)
        starts, longest = case.query_starts, int(case.lengths.max())

        def attend(layer: int) -> torch.Tensor:
            out = package.flash_attn_with_kvcache(
                *(case.q, case.k_pages[layer], case.v_pages[layer]),
                cache_seqlens=case.contexts,
                page_table=case.page_table,
                cu_seqlens_q=starts,
                max_seqlen_q=longest,
                causal=True,
            )
            return out[0] if isinstance(out, tuple) else out

        return attend
