"""Runs a decoder over its paged cache, one step at a time, as the engine does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.page_layout import ONE_GROUP, PageLayout, first_in_window
from jaxserve.kernels import Rows
from jaxserve.models.batch import AttentionBatch, empty_cache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.families import config_from_hf
from jaxserve.models.loading import abstract_model, fitted, load_params, under_own_names
from jaxserve.models.safetensors_source import SafetensorsSource
from jaxserve.models.weights import WeightSource
from jaxserve.sharding import state_shardings
from jaxserve.steps.step_function import Placement

PAGE_SIZE = 4
PAGES_PER_SEQUENCE = 16
NUM_SEQUENCES = 3
NUM_TOKENS = 48


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _step(graphdef, state, tokens, batch, cache):
    model = nnx.merge(graphdef, state)
    hidden, cache = model(tokens, batch, cache)
    return model.logits(hidden, batch.adapter), cache


class Server:
    """A model, its cache, and a page table for each of `NUM_SEQUENCES` sequences.

    Sizes are the same for all, so that tests of one configuration share their executables.

    Args:
      adapters: the adapter of each sequence, -1 for none; None for models without adapters.
      layout: the groups of pages; pages behind a window are spoilt.
      implementation: of attention; None for the platform's choice.
    """

    def __init__(
        self,
        graphdef,
        params,
        config,
        layer_layout="unrolled",
        kv_dtype: str = "float32",
        adapters: tuple[int, ...] | None = None,
        layout: PageLayout = ONE_GROUP,
        implementation: str | None = None,
    ):
        self._adapters = adapters
        self._layout, self._implementation = layout, implementation
        self._graphdef, self._params = graphdef, params
        self._place = Placement.like(jax.tree.leaves(params)[0].sharding)
        pages = 1 + NUM_SEQUENCES * PAGES_PER_SEQUENCE * layout.num_tables
        self._cache = empty_cache(
            config,
            pages,
            PAGE_SIZE,
            kv_dtype,
            layer_layout,
            num_shards=self._place.num_shards,
            num_slots=NUM_SEQUENCES,
            num_buffers=layout.num_buffers if layout.is_grouped else None,
        )
        self._has_states = config.num_recurrent_layers > 0
        # In an engine the null page, and a slot of no sequence, hold arbitrary values.
        garbage = {True: jnp.nan, False: 77}
        self._cache = jax.tree.map(
            lambda x: x.at[:, 0].set(garbage[jnp.issubdtype(x.dtype, jnp.floating)]), self._cache
        )
        self._cache = jax.device_put(self._cache, self._place.cache(config))
        order = np.random.default_rng(3).permutation(np.arange(1, pages, dtype=np.int32))
        self._tables = order.reshape(NUM_SEQUENCES, -1)
        self._lengths = [0] * NUM_SEQUENCES

    @classmethod
    def from_folder(
        cls, folder: Path, layer_layout="unrolled", mesh=None, kv_dtype: str = "float32"
    ) -> Server:
        config = config_from_hf(json.loads((folder / "config.json").read_text()))
        return cls.from_source(SafetensorsSource(folder), config, layer_layout, mesh, kv_dtype)

    @classmethod
    def from_source(
        cls,
        source: WeightSource,
        config: DecoderConfig,
        layer_layout="unrolled",
        mesh=None,
        kv_dtype: str = "float32",
    ) -> Server:
        source = under_own_names(source, config)
        config = fitted(config, source)
        graphdef, abstract = abstract_model(config, layer_layout=layer_layout)
        shardings = None if mesh is None else state_shardings(abstract, mesh)
        params = load_params(abstract, config, source, shardings)
        return cls(graphdef, params, config, layer_layout, kv_dtype)

    @property
    def model(self):
        """The decoder."""
        return nnx.merge(self._graphdef, self._params)

    def step(self, rows: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Append tokens to sequences in one padded mixed batch; return logits of each row."""
        return self._run(rows, NUM_TOKENS, None)

    def decode(self, tokens: dict[int, int]) -> list[np.ndarray]:
        """Append one token to some sequences in a decode batch; return logits, [1, vocab] each."""
        return self._run([(i, np.asarray([t])) for i, t in tokens.items()], NUM_SEQUENCES, 1)

    def _run(
        self, rows: list[tuple[int, np.ndarray]], num_tokens: int, max_query_length: int | None
    ) -> list[np.ndarray]:
        num_tables = self._layout.num_tables
        tokens = np.zeros(num_tokens, np.int32)
        positions, offset = np.zeros((2, num_tokens), np.int32)
        page = np.zeros((num_tokens, num_tables), np.int32)
        adapter = np.full(num_tokens, -1, np.int32)
        fields = np.zeros((4, NUM_SEQUENCES), np.int32)
        tables = np.zeros((NUM_SEQUENCES, PAGES_PER_SEQUENCE * num_tables), np.int32)
        slots = np.zeros(NUM_SEQUENCES, np.int32)
        places, at = [], 0
        for row, (sequence, new) in enumerate(rows):
            first, size = self._lengths[sequence], len(new)
            self._spoil_behind(sequence, first)
            place = slice(at, at + size)
            tokens[place] = new
            positions[place] = np.arange(first, first + size)
            table = self._tables[sequence].reshape(-1, num_tables)
            page[place] = table[positions[place] // PAGE_SIZE]
            offset[place] = positions[place] % PAGE_SIZE
            if self._adapters is not None:
                adapter[place] = self._adapters[sequence]
            fields[:, row] = (at, size, first, first + size)
            tables[row] = self._tables[sequence]
            slots[row] = sequence
            places.append(place)
            self._lengths[sequence] += size
            at += size
        batch = AttentionBatch(
            positions=jnp.asarray(positions),
            page=jnp.asarray(page if self._layout.is_grouped else page[:, 0]),
            offset=jnp.asarray(offset),
            rows=Rows(*map(jnp.asarray, fields), page_table=jnp.asarray(tables)),
            max_query_length=max_query_length,
            adapter=None if self._adapters is None else jnp.asarray(adapter),
            slot=jnp.asarray(slots) if self._has_states else None,
            places=self._layout.places,
            implementation=self._implementation,
        )
        with self._place.in_force():
            logits, self._cache = _step(
                self._graphdef, self._params, jnp.asarray(tokens), batch, self._cache
            )
        logits = np.asarray(logits)
        return [logits[place] for place in places]

    def _spoil_behind(self, sequence: int, position: int) -> None:
        """Write NaN into the pages that no query from `position` on sees."""
        table = self._tables[sequence].reshape(-1, self._layout.num_tables)
        for group in self._layout.groups if self._layout.is_grouped else ():
            if group.window is None:
                continue
            passed = table[: first_in_window(position, group.window, PAGE_SIZE)]
            spoilt = passed[:, list(self._layout.tables(group))].ravel()
            self._cache = jax.tree.map(lambda x: x.at[:, spoilt].set(jnp.nan), self._cache)  # noqa: B023
