"""PyTorch's attention kernels at the same shapes: `python -m benchmarks.kernels.peers --help`.

A peer that is missing or fails is recorded with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, Record, option, reason, some_of
from benchmarks.kernels.timing import chosen, num_layers, scattered
from jaxserve.kernels.paged_attention.shapes import AttentionShape

CALLS = 20
_REPEATS = 9

# Number of a layer -> output.
Attend = Callable[[int], torch.Tensor]


def measure(attend: Attend, layers: int, device: torch.device) -> dict[str, Any]:
    """Return `seconds` of a call, and how it was `timed`.

    On a GPU, events around replays of a graph of calls give the time. Calls that cannot be captured
    are timed themselves; then `reason` says why, and small shapes wait for the host.
    """

    def chain() -> None:
        for i in range(CALLS):
            attend(i % layers)

    chain()
    if device.type != "cuda":
        begin_s = time.perf_counter()
        chain()
        return {"seconds": (time.perf_counter() - begin_s) / CALLS, "timed": "by the host"}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {
            "seconds": _events_s(chain) / CALLS,
            "timed": "events",
            "reason": f"no graph: {str(error).splitlines()[0]}",
        }
    return {"seconds": _events_s(graph.replay) / CALLS, "timed": "events around a graph"}


def _events_s(run: Callable[[], None]) -> float:
    """Return the median of single runs, after one that is not timed."""
    run()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


# The last queries of the compared rows.
_QUERIES_COMPARED = 256


@final
@dataclass(frozen=True)
class Case:
    """Random queries, and pages of enough layers to exceed the device's caches.

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
        cls, shape: AttentionShape, *, page_size: int, layers: int, device: Any, dtype: Any
    ) -> Case:
        """Return the shape with pages of this size."""
        lengths, contexts = np.asarray(shape.rows).T
        table, num_pages = scattered(contexts, page_size)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        def whole_numbers(values: object) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=device)

        cache = (num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        return cls(
            shape=shape,
            page_size=page_size,
            q=normal(int(lengths.sum()), shape.num_heads, shape.head_dim),
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


def dense(backend: SDPBackend, case: Case) -> Attend:
    """Return PyTorch's attention over keys that were laid out beforehand, for even rows only."""
    shape = case.shape
    queries, context = shape.rows[0]
    if len(set(shape.rows)) > 1 or not (queries == 1 or queries == context):
        raise NotImplementedError("dense: it serves contexts of one length, and whole prompts")
    q = _batched(case, queries)
    table = case.page_table.long()

    def laid_out(pages: torch.Tensor) -> torch.Tensor:
        return pages[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()

    keys, values = (list(map(laid_out, pages)) for pages in (case.k_pages, case.v_pages))

    def attend(layer: int) -> torch.Tensor:
        with sdpa_kernel([backend]):
            out = scaled_dot_product_attention(
                q, keys[layer], values[layer], is_causal=queries > 1, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _batched(case: Case, queries: int) -> torch.Tensor:
    """[batch, heads, queries, head_dim]"""
    return case.q.unflatten(0, (len(case.shape.rows), queries)).transpose(1, 2)


def flash_attention_2(case: Case) -> Attend:
    """Return the kernel for caches if each row has one query, else the one for ragged rows."""
    package = importlib.import_module("flash_attn")
    if case.shape.is_decode:
        q = case.q.unsqueeze(1)  # [batch, 1, heads, head_dim]

        def attend(layer: int) -> torch.Tensor:
            out = package.flash_attn_with_kvcache(
                q,
                case.k_pages[layer],
                case.v_pages[layer],
                cache_seqlens=case.contexts,
                block_table=case.page_table,
                causal=True,
            )
            return out.squeeze(1)

        return attend
    longest = int(case.lengths.max()), int(case.contexts.max())
    starts = case.query_starts
    key_starts = _starts(case.contexts)

    def attend_rows(layer: int) -> torch.Tensor:
        return package.flash_attn_varlen_func(
            case.q,
            case.k_pages[layer],
            case.v_pages[layer],
            starts,
            key_starts,
            *longest,
            causal=True,
            block_table=case.page_table,
        )

    return attend_rows


def flash_attention_3(case: Case) -> Attend:
    """Return the kernel for ragged rows over pages, which serves every shape."""
    package = importlib.import_module("flash_attn_interface")
    starts, longest = case.query_starts, int(case.lengths.max())

    def attend(layer: int) -> torch.Tensor:
        out = package.flash_attn_with_kvcache(
            case.q,
            case.k_pages[layer],
            case.v_pages[layer],
            cache_seqlens=case.contexts,
            page_table=case.page_table,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return attend


_BLOCK = 128


def paged_flex(case: Case) -> Attend:
    """Return flex attention over the cache as one sequence; the mask selects each row's pages."""
    shape = case.shape
    if len(shape.rows) > 1 and not shape.is_decode:
        raise NotImplementedError("here it serves decoding, and prompts one by one")
    queries = max(queries for queries, _ in shape.rows)
    q = _batched(case, queries).contiguous()

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


_WORKSPACE_BYTES = 512 << 20


def flashinfer(case: Case) -> Attend:
    """Plan once, and return the call that runs the plan."""
    package = importlib.import_module("flashinfer")
    dtype, shape = case.q.dtype, case.shape
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.q.device)
    pages = (case.page_starts, case.pages_in_order, case.last_page_lengths)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, case.page_size)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    if shape.is_decode:
        # As its documentation advises for grouped queries.
        is_grouped = shape.num_heads >= 4 * shape.num_kv_heads
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=is_grouped
        )
        wrapper.plan(*pages, *heads, **dtypes)
    else:
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(case.query_starts, *pages, *heads, causal=True, **dtypes)

    def attend(layer: int) -> torch.Tensor:
        return wrapper.run(case.q, (case.k_pages[layer], case.v_pages[layer]))

    return attend


PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3")


@final
@dataclass(frozen=True)
class Peer:
    """An implementation of attention.

    Attributes:
      package: the Python package that it needs.
      prepare: returns the call to time. Raises NotImplementedError for an unsupported shape.
    """

    package: str
    page_size: int
    prepare: Callable[[Case], Attend]


# The quickest to compile first.
PEERS = {
    "torch_flash_dense": Peer("torch", 128, partial(dense, SDPBackend.FLASH_ATTENTION)),
    "torch_cudnn_dense": Peer("torch", 128, partial(dense, SDPBackend.CUDNN_ATTENTION)),
    "flash_attention_3": Peer("flash_attn_interface", 128, flash_attention_3),
    "flash_attention_2": Peer("flash_attn", 256, flash_attention_2),  # its least
    "flashinfer": Peer("flashinfer", 32, flashinfer),  # as in our runtime
    "torch_flex_paged": Peer("torch", _BLOCK, paged_flex),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shapes, _ = chosen(options.shapes, options.leave_out)
    names = some_of(options.peers, "--peers", PEERS)
    about = {"dtype": options.dtype, **environment.describe_torch(device, *PACKAGES)}
    record = Record.of("kernel_peers", options, **about)
    dtype = getattr(torch, options.dtype)
    for shape in tqdm(shapes, desc="timing peers", delay=2, leave=False):
        found: dict[str, Any] = {"shape": shape.name, "peers": {}}
        record.result.setdefault("shapes", []).append(found)
        for name in names:
            if record.allows(f"{shape.name}, {name}"):
                found["peers"][name] = figures(PEERS[name], shape, device, dtype)
                record.save()
    return record.result


def figures(
    peer: Peer, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return `seconds` of a call and its `error`, or the `reason` why there are none."""
    try:
        importlib.import_module(peer.package)
        return _timed(peer, shape, device, dtype)
    except Exception as failed:
        return {"reason": reason(failed)}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(
    peer: Peer, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    layers = num_layers(shape, str(dtype).removeprefix("torch."))
    with torch.inference_mode():
        case = Case.of(shape, page_size=peer.page_size, layers=layers, device=device, dtype=dtype)
        attend = peer.prepare(case)
        error = case.error(attend(0))
        return {**measure(attend, layers, device), "error": error, "page_size": peer.page_size}


OPTIONS = (
    option("--shapes", "decode,prefill,mixed", "as for benchmarks.kernels"),
    option("--leave-out", "", "shapes to leave out, likewise"),
    option("--peers", ",".join(PEERS), "some of them"),
    option("--dtype", "bfloat16", "of queries and pages"),
    option("--device", None, "PyTorch's name; its GPU where it finds one"),
)
main = Benchmark(__doc__, run, OPTIONS, "kernel_peers", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
