"""PyTorch's flex attention over pages: a block mask whose blocks of keys are a row's pages."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.kernels.peers.case import Case
from benchmarks.kernels.peers.timing import Attend

_BLOCK = 128


@final
class PagedFlex:
    """Flex attention over the whole cache as one sequence; the mask selects each row's pages.

    Attributes:
      page_size: keys of a block of its kernels.
    """

    page_size = _BLOCK
    package = "torch"

    def prepare(self, case: Case) -> Attend:
        """Return the call to time. Raises NotImplementedError for rows of several query lengths."""
        shape = case.shape
        if len(shape.rows) > 1 and not shape.is_decode:
            raise NotImplementedError("here it serves decoding, and prompts one by one")
        queries = max(queries for queries, _ in shape.rows)
        # [batch, heads, queries, head_dim]
        q = case.q.unflatten(0, (len(shape.rows), queries)).transpose(1, 2).contiguous()

        def as_one_sequence(pages: torch.Tensor) -> torch.Tensor:
            """[1, kv_heads, tokens, head_dim]"""
            return pages.flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous()

        keys, values = (list(map(as_one_sequence, pages)) for pages in (case.k_pages, case.v_pages))
        mask = block_mask(case, queries)
        run = flex_attention
        if q.device.type == "cuda":
            torch._dynamo.reset()  # for this shape alone
            run = torch.compile(flex_attention, dynamic=False)

        def attend(layer: int) -> torch.Tensor:
            out = run(q, keys[layer], values[layer], block_mask=mask, enable_gqa=True)
            assert isinstance(out, torch.Tensor)
            return out.transpose(1, 2).flatten(0, 1)

        return attend


def block_mask(case: Case, queries: int) -> BlockMask:
    """Return the pages that each block of queries sees whole, and those that it sees in part."""
    table, contexts = case.page_table.cpu().numpy(), case.contexts.cpu().numpy()
    num_pages = len(case.k_pages[0])
    # The row of a page, and its position in the row.
    owner, place = np.zeros((2, num_pages), np.int32)
    held = np.arange(table.shape[1]) < case.pages_held.cpu().numpy()[:, None]
    owner[table[held]], place[table[held]] = np.nonzero(held)
    first = np.arange(0, queries, _BLOCK)
    begin = contexts[:, None] - queries + first  # [rows, blocks]: position of the first query
    end = contexts[:, None] - queries + np.minimum(first + _BLOCK, queries)
    num_whole = (begin + 1) // case.page_size
    num_partly = -(-end // case.page_size) - num_whole
    shape = (*begin.shape, num_pages)
    whole, partly = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, block in np.ndindex(begin.shape):
        seen, more = num_whole[row, block], num_partly[row, block]
        whole[row, block, :seen] = table[row, :seen]
        partly[row, block, :more] = table[row, seen : seen + more]
    device = case.q.device
    owners, places = (torch.as_tensor(x, device=device) for x in (owner, place))
    lengths = case.contexts

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        page = kv // case.page_size
        position = places[page] * case.page_size + kv % case.page_size
        return (owners[page] == b) & (position <= lengths[b] - queries + q)

    def blocks(x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(x[:, None], np.int32), device=device)

    return BlockMask.from_kv_blocks(
        blocks(num_partly),
        blocks(partly),
        blocks(num_whole),
        blocks(whole),
        BLOCK_SIZE=(_BLOCK, case.page_size),
        mask_mod=sees,
        seq_lengths=(queries, num_pages * case.page_size),
    )
