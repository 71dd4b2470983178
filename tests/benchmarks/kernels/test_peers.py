"""PyTorch's attention gets the same inputs as ours: page tables, rows, causality."""

from __future__ import annotations

import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from benchmarks.kernels.peers import PEERS, Case, block_mask, figures, main
from jaxserve.kernels import Rows, paged_attention
from jaxserve.kernels.paged_attention.shapes import AttentionShape

pytestmark = pytest.mark.release

CPU = torch.device("cpu")
HEADS = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
RAGGED = AttentionShape(name="ragged", rows=((1, 130), (1, 1), (1, 128), (1, 257)), **HEADS)
EVEN = AttentionShape(name="even", rows=((1, 130),) * 3, **HEADS)
PROMPT = AttentionShape(name="prompt", rows=((150, 150),), **HEADS)
TURN = AttentionShape(name="turn", rows=((20, 300),), **HEADS)
CHUNK = AttentionShape(name="chunk", rows=((200, 333),), **HEADS)
MIXED = AttentionShape(name="mixed", rows=((1, 40), (30, 50)), **HEADS)
# flex attention warns that it is slow if it is not compiled.
UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def _case(shape: AttentionShape, page_size: int) -> Case:
    return Case.of(shape, page_size=page_size, layers=2, device=CPU, dtype=torch.float32)


def _reference(case: Case) -> np.ndarray:
    """Return the output of our reference for the first layer."""

    def pages(layers: list[torch.Tensor]) -> jnp.ndarray:
        return jnp.asarray(torch.stack(layers).transpose(2, 3).contiguous().numpy())

    lengths, contexts = case.lengths.numpy(), case.contexts.numpy()
    rows = Rows(
        query_start=jnp.asarray(case.query_starts.numpy()[:-1]),
        query_length=jnp.asarray(lengths),
        first_position=jnp.asarray(contexts - lengths),
        context_length=jnp.asarray(contexts),
        page_table=jnp.asarray(case.page_table.numpy()),
    )
    out = paged_attention(
        jnp.asarray(case.q.numpy()),
        pages(case.k_pages),
        pages(case.v_pages),
        0,
        rows,
        implementation="reference",
    )
    return np.asarray(out)


@pytest.mark.parametrize("shape", [RAGGED, PROMPT, TURN, MIXED], ids=lambda shape: shape.name)
def test_a_case_means_the_same_as_our_rows(shape: AttentionShape):
    """The case's own float32 attention agrees with our reference over the same pages."""
    case = _case(shape, 8)
    ours = torch.from_numpy(_reference(case).copy())
    assert case.error(ours) < 1e-5
    assert case.error(ours.roll(1, dims=1)) > 0.1
    held = case.pages_in_order.tolist()
    assert sorted(held) == list(range(len(case.k_pages[0])))
    starts = case.page_starts.tolist()
    for row, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        assert held[begin:end] == case.page_table[row, : end - begin].tolist()
    tokens = 8 * (case.pages_held - 1) + case.last_page_lengths
    assert tokens.tolist() == case.contexts.tolist()


@UNCOMPILED
@pytest.mark.parametrize("shape", [RAGGED, EVEN, PROMPT, TURN, CHUNK], ids=lambda shape: shape.name)
def test_paged_flex_attention_agrees_with_our_reference(shape: AttentionShape):
    """Every token of every row agrees, over scattered pages whose last ones are partly filled."""
    peer = PEERS["torch_flex_paged"]
    case = _case(shape, peer.page_size)
    out = peer.prepare(case)(0)
    np.testing.assert_allclose(out.numpy(), _reference(case), rtol=1e-4, atol=1e-5)
    assert case.error(peer.prepare(case)(1)) > 0.1


@pytest.mark.parametrize("shape", [RAGGED, PROMPT, TURN, CHUNK], ids=lambda shape: shape.name)
def test_blocks_are_those_that_the_mask_lets_see(shape: AttentionShape):
    """Uncompiled flex attention calls only the mask; compiled, it uses the blocks."""
    case = _case(shape, PEERS["torch_flex_paged"].page_size)
    queries = max(queries for queries, _ in shape.rows)
    mask = block_mask(case, queries)
    num_keys = len(case.k_pages[0]) * case.page_size
    dense = create_mask(mask.mask_mod, len(shape.rows), 1, queries, num_keys, device="cpu")
    assert dense.sum() == sum(
        context - queries + 1 + i for _, context in shape.rows for i in range(queries)
    )
    size = mask.BLOCK_SIZE[0]
    for row, block in np.ndindex(len(shape.rows), -(-queries // size)):
        seen = dense[row, 0, block * size : (block + 1) * size].unflatten(-1, (-1, case.page_size))

        def pages(numbers: torch.Tensor, indices: torch.Tensor, at=(row, 0, block)) -> set[int]:
            return set(indices[at][: numbers[at]].tolist())

        whole = pages(mask.full_kv_num_blocks, mask.full_kv_indices)
        partly = pages(mask.kv_num_blocks, mask.kv_indices)
        assert not whole & partly
        assert whole | partly == set(seen.any(-1).any(0).nonzero().flatten().tolist())
        assert whole <= set(seen.all(-1).all(0).nonzero().flatten().tolist())


@pytest.mark.parametrize("shape", [EVEN, PROMPT], ids=lambda shape: shape.name)
def test_dense_attention_agrees_with_our_reference(shape: AttentionShape):
    """Keys are copied out of the pages beforehand."""
    peer = PEERS["torch_flash_dense"]
    case = _case(shape, peer.page_size)
    out = peer.prepare(case)(0)
    np.testing.assert_allclose(out.numpy(), _reference(case), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["torch_flash_dense", "torch_flex_paged"])
def test_what_a_peer_does_not_serve_is_said(name: str):
    """A batch of both kinds of rows is recorded with a reason, like a failure."""
    found = figures(PEERS[name], MIXED, CPU, torch.float32)
    assert set(found) == {"reason"}
    assert found["reason"].startswith("NotImplementedError: ")


@UNCOMPILED
def test_missing_peers_are_recorded_with_the_reason(capsys, monkeypatch, tmp_path):
    """The other peers are timed, with their errors."""
    monkeypatch.setattr("benchmarks.kernels.peers.chosen", lambda *_: ([TURN], []))
    output = tmp_path / "peers.json"
    assert main(["--device", "cpu", "--dtype", "float32", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result == json.loads(capsys.readouterr().out)
    (row,) = result["shapes"]
    assert set(row["peers"]) == set(PEERS)
    for name, found in row["peers"].items():
        if importlib.util.find_spec(PEERS[name].package) is None:
            assert found["reason"].startswith("ModuleNotFoundError"), name
    flex = row["peers"]["torch_flex_paged"]
    assert flex["error"] < 1e-5
    assert flex["seconds"] > 0
    assert flex["timed"] == "by the host"
    assert result["versions"]["torch"] == torch.__version__
