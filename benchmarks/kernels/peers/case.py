"""A shape of paged attention in PyTorch: its tensors, and its output in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from pallas_kernels.paged_attention.shapes import AttentionShape

# Of the rows that are compared, the last queries.
_QUERIES_COMPARED = 256


@final
@dataclass(frozen=True)
class Case:
    """Random queries, and pages of as many layers as keep them out of the device's caches.

    Attributes:
      page_size: of the peer, which may differ from the shape's.
      q: [tokens, heads, head_dim].
      k_pages, v_pages: a layer, [pages, page_size, kv_heads, head_dim]. Each page is one row's.
      page_table: int32 [rows, pages], scattered; 0 past the row's end.
      lengths, contexts: int32 [rows] of queries, and of keys.
    """

    shape: AttentionShape
    page_size: int
    q: torch.Tensor
    k_pages: list[torch.Tensor]
    v_pages: list[torch.Tensor]
    page_table: torch.Tensor
    lengths: torch.Tensor
    contexts: torch.Tensor

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        *,
        page_size: int,
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Case:
        """Return the shape with pages of this size."""
        contexts = np.asarray([context for _, context in shape.rows])
        needed = -(-contexts // page_size)
        pages = np.random.default_rng(0).permutation(int(needed.sum()))
        table = np.zeros((len(contexts), int(needed.max())), np.int32)
        table[np.arange(table.shape[1]) < needed[:, None]] = pages
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        def whole_numbers(values: object) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=device)

        cache = (len(pages), page_size, shape.num_kv_heads, shape.head_dim)
        lengths = [queries for queries, _ in shape.rows]
        return cls(
            shape=shape,
            page_size=page_size,
            q=normal(sum(lengths), shape.num_heads, shape.head_dim),
            k_pages=[normal(*cache) for _ in range(layers)],
            v_pages=[normal(*cache) for _ in range(layers)],
            page_table=whole_numbers(table),
            lengths=whole_numbers(lengths),
            contexts=whole_numbers(contexts),
        )

    @property
    def query_starts(self) -> torch.Tensor:
        """int32 [rows + 1]: the first query of each row, and the end."""
        return _starts(self.lengths)

    @property
    def pages_held(self) -> torch.Tensor:
        """int32 [rows]: pages of each row."""
        return (self.contexts + self.page_size - 1) // self.page_size

    @property
    def page_starts(self) -> torch.Tensor:
        """int32 [rows + 1]: where the pages of each row begin in `pages_in_order`."""
        return _starts(self.pages_held)

    @property
    def pages_in_order(self) -> torch.Tensor:
        """int32 [pages]: the pages of row after row."""
        columns = torch.arange(self.page_table.shape[1], device=self.page_table.device)
        return self.page_table[columns < self.pages_held[:, None]]

    @property
    def last_page_lengths(self) -> torch.Tensor:
        """int32 [rows]: tokens in the last page of each row."""
        return (self.contexts - 1) % self.page_size + 1

    def error(self, out: torch.Tensor) -> float:
        """Return the relative norm of the difference between `out` of layer 0 and float32.

        The last queries of the first row and of the last row are compared.
        """
        got, wanted = [], []
        for row in {0, len(self.shape.rows) - 1}:
            queries, context = self.shape.rows[row]
            count = min(queries, _QUERIES_COMPARED)
            end = int(self.query_starts[row + 1])
            got.append(out[end - count : end].float())
            wanted.append(self._attended(row, self.q[end - count : end], context))
        difference = torch.cat(got) - torch.cat(wanted)
        return float(difference.norm() / torch.cat(wanted).norm())

    def _attended(self, row: int, q: torch.Tensor, context: int) -> torch.Tensor:
        """float32 [queries, heads, head_dim] of a row's last queries."""
        pages = self.page_table[row, : int(self.pages_held[row])].long()
        k, v = (
            x[0][pages].flatten(0, 1)[:context].float().repeat_interleave(self._group, dim=1)
            for x in (self.k_pages, self.v_pages)
        )
        logits = torch.einsum("qhd,khd->hqk", q.float(), k) * self.shape.head_dim**-0.5
        key = torch.arange(context, device=q.device)
        position = context - len(q) + torch.arange(len(q), device=q.device)
        logits = logits.masked_fill(key > position[:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)

    @property
    def _group(self) -> int:
        return self.shape.num_heads // self.shape.num_kv_heads


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
