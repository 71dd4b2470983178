"""The timer of a model's layers on devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.weights import sharded
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.attention import causal_rows, cross_rows
from jaxserve.models.batch import AttentionBatch, KVCache, empty_cache
from jaxserve.models.config import DecoderConfig, check_fits
from jaxserve.models.context import CrossContext, LayerContext
from jaxserve.models.encoder_decoder import (
    CrossBlock,
    Encoder,
    EncoderBatch,
    EncoderContext,
    EncoderDecoder,
    RelativeConfig,
    both_ways_biases,
    causal_biases,
)
from jaxserve.models.loading import abstract_model, random_params
from jaxserve.models.quantisation import Quantisation, Quantiser
from jaxserve.models.recurrence import Advance, Arrays, Inputs
from jaxserve.models.rope import rope_tables
from jaxserve.planning.layers import profile as parts
from jaxserve.planning.layers.profile import LayerSizes
from jaxserve.scheduling.plan import Row
from jaxserve.sharding import make_mesh
from jaxserve.sharding.shards import TENSOR, over_tensor, sum_over_tensor
from jaxserve.steps.attention_planner import AttentionPlanner
from jaxserve.steps.packing import pack_rows
from jaxserve.steps.sampling.choice import argmax
from jaxserve.steps.step_function import Placement

# Calls are repeated in blocks of about this length; the result is the median of the blocks.
_BLOCK_S = 0.02
_NUM_BLOCKS = 3
_MAX_CALLS = 64
# A call that takes at least this long is not repeated.
_LONG_S = 0.25


def seconds_of(call: Callable[[Any], Any], start: Any) -> tuple[float, Any]:
    """Return the seconds of a call, and its last result; the first call may donate `start`.

    Each call takes the previous result, so that calls follow each other on the device as layers do.
    The first call, which compiles, is not counted. A call of `_LONG_S` or more is timed once.
    """
    value = jax.block_until_ready(call(start))
    began_s = time.perf_counter()
    value = jax.block_until_ready(call(value))
    once_s = max(time.perf_counter() - began_s, 1e-6)
    if once_s >= _LONG_S:
        return once_s, value
    num_calls = min(_MAX_CALLS, max(1, round(_BLOCK_S / once_s)))
    blocks = []
    for _ in range(_NUM_BLOCKS):
        began_s = time.perf_counter()
        for _ in range(num_calls):
            value = call(value)
        value = jax.block_until_ready(value)
        blocks.append((time.perf_counter() - began_s) / num_calls)
    return statistics.median(blocks), value


# Several copies of a block's weights defeat caches, as the weights of other layers would.
_WEIGHTS_BYTES = 256 << 20
_MAX_COPIES = 32


@final
class TimedBlock:
    """A `layers.Block`, in several copies, with a stub for attention that costs little."""

    def __init__(self, block: nnx.Module, group: int, place: Placement):
        definition, params = nnx.split(block)
        self._place = place
        self._params = _copies_of(params)

        def rest(params: Any, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
            context: LayerContext = _WithoutAttention(group)
            return nnx.merge(definition, params)(x, context)

        self._here = jax.jit(rest, out_shardings=place.whole)
        self._anywhere = jax.jit(rest)

    def rest_s(self, x: Float[Array, "tokens embed"]) -> float:
        params = cycle(self._params)
        with self._place.in_force():
            return seconds_of(lambda x: self._here(next(params), x), x)[0]

    def busy_s(self, x: Float[Array, "tokens embed"], devices: Sequence[Any]) -> float:
        params = [jax.device_put(self._params[0], device) for device in devices]
        start = [jax.device_put(x, device) for device in devices]

        def everywhere(inputs: list[Array]) -> list[Array]:
            return [self._anywhere(own, x) for own, x in zip(params, inputs, strict=True)]

        with self._place.in_force():
            return seconds_of(everywhere, start)[0]


@final
class _WithoutAttention:
    """A `LayerContext` in which a query attends only to its own key and value."""

    adapter: Int32[Array, " tokens"] | None = None
    layer_input: Float[Array, "tokens width"] | None = None

    def __init__(self, group: int):
        self._group = group

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
        alibi_slopes: tuple[float, ...] | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
        is_rotated: bool = False,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Use keys and values in the result, so that XLA does not remove their computation."""
        group = self._group
        own = qkv[:, :, group] + qkv[:, :, group + 1]
        out = qkv[:, :, :group] + jnp.asarray(1e-6, qkv.dtype) * own[:, :, None]
        return out.reshape(len(qkv), -1, qkv.shape[-1])

    def positions(self, num_tokens: int) -> Int32[Array, " tokens"]:
        return jnp.arange(num_tokens)

    def rotated(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        return x

    def attend_shared(
        self, q: Float[Array, "tokens kv_heads columns head_dim"], *, scale: float | None
    ) -> Float[Array, "tokens q_heads head_dim"]:
        return q.reshape(len(q), -1, q.shape[-1])

    def recur(self, advance: Advance, arrays: Arrays, inputs: Inputs) -> Float[Array, "tokens ..."]:
        raise NotImplementedError("layers with a state, which the planner does not measure")

    def cross(self) -> Any:
        return _WithoutCrossAttention()


@final
class _WithoutCrossAttention:
    """A `CrossContext` that returns its queries."""

    adapter: Int32[Array, " tokens"] | None = None

    def attend(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        return q


def _copies_of(params: Any) -> list[Any]:
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    num = min(_MAX_COPIES, max(1, -(-_WEIGHTS_BYTES // num_bytes)))
    return [params, *(jax.tree.map(jnp.copy, params) for _ in range(num - 1))]


@final
class EncoderLayer:
    def __init__(self, encoder: Encoder, place: Placement):
        self._config = encoder.config
        self._place = place
        assert isinstance(encoder.blocks, nnx.List), "layers that are not stacked"
        self.block = TimedBlock(encoder.blocks[0], encoder.config.group, place)
        with place.in_force():
            biases = both_ways_biases(encoder.relative_bias[...], encoder.max_distance)

        def attend(
            qkv: Float[Array, "tokens heads 3 head_dim"], batch: EncoderBatch, biases: Array
        ) -> Float[Array, "tokens heads 3 head_dim"]:
            out = EncoderContext(batch, biases).attend(
                qkv,
                scale=encoder.config.attention_scale,
                soft_cap=encoder.config.attention_soft_cap,
            )
            return qkv + jnp.asarray(1e-6, qkv.dtype) * out[:, :, None]

        self._biases = jax.device_put(biases, place.whole)
        self._attend = jax.jit(attend)

    def attention_s(self, num_prompts: int, qkv: Float[Array, "tokens heads 3 head_dim"]) -> float:
        """Return the seconds of attention in a pass over prompts of equal length."""
        length = len(qkv) // num_prompts
        prompt = np.repeat(np.arange(num_prompts, dtype=np.int32), length)
        positions = np.tile(np.arange(length, dtype=np.int32), num_prompts)
        batch = EncoderBatch(np.zeros_like(prompt), prompt, positions)  # pyrefly: ignore[bad-argument-type]
        batch = jax.device_put(batch, self._place.whole)
        with self._place.in_force():
            return seconds_of(lambda qkv: self._attend(qkv, batch, self._biases), qkv)[0]


_KV_BYTES = 256 << 20


def quantised_model(config: DecoderConfig, sizes: LayerSizes) -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, _ = abstract_model(config)
    params = random_params(config, 0)
    quantisation = Quantisation.of(RuntimeOptions.parse(sizes.weights))
    if quantisation is None:
        return graphdef, params
    return nnx.split(Quantiser(nnx.merge(graphdef, params), quantisation).model(params))


def one_layer(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration of one layer, with full attention if the model has such a layer.

    An encoder-decoder model also keeps one encoder layer.
    """
    windows = config.sliding_windows
    layer = windows.index(None) if None in windows else 0
    one = config.part(range(layer, layer + 1))
    if not config.has_encoder:
        return one
    return replace(one, num_encoder_layers=1)  # pyrefly: ignore[unexpected-keyword]


@final
class ShardedLayer:
    """A layer with random weights, its KV cache, and the model's head, sharded over devices.

    `config` is that of `one_layer`; of an encoder-decoder model it has a decoder and an encoder
    layer.
    """

    def __init__(self, config: DecoderConfig, sizes: LayerSizes, devices: Sequence[Any]):
        self._config = config
        self._sizes = sizes
        graphdef, params = quantised_model(config, sizes)
        params = jax.device_put(params, devices[0])
        if len(devices) > 1:
            params = sharded(params, make_mesh(tensor=len(devices), devices=devices), config)
        self._params = params
        self._place = Placement.like(jax.tree.leaves(params)[0].sharding)
        model = nnx.merge(graphdef, params)
        block, place = model.blocks[0], self._place.whole
        self._block = TimedBlock(block, config.group, self._place)
        self._encoder: EncoderLayer | None = None
        self._distance_bias: Float32[Array, "heads distances"] | None = None
        self._join: Any = None
        if isinstance(model, EncoderDecoder):
            self._encoder = EncoderLayer(model.encoder, self._place)
            self._join = self._joining(cast(CrossBlock, block))
            with self._place.in_force():
                far = cast(RelativeConfig, config).max_distance
                biases = causal_biases(model.relative_bias[...], far).astype(jnp.float32)
            self._distance_bias = jax.device_put(biases, place)

        def head(params: Any, x: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
            _, largest = argmax(nnx.merge(graphdef, params).logits(x))
            return x + 1e-9 * largest[:, None].astype(x.dtype)

        def sums(x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
            num = self._place.num_shards
            every = PartitionSpec()
            shard = partial(sum_over_tensor, num_shards=num)
            return over_tensor(shard, in_specs=every, out_specs=every)(x) / num

        def attend(qkv: Array, tables: Any, batch: AttentionBatch, cache: KVCache) -> Any:
            out, cache = cache.attend(
                0,
                qkv,
                tables,
                batch,
                sliding_window=config.sliding_windows[0],
                scale=config.attention_scale,
                soft_cap=config.attention_soft_cap,
            )
            return out, cache

        def see(q: Array, batch: AttentionBatch, cache: KVCache) -> Array:
            options = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
            return cache.read(0, q, batch, **options)

        self._head = jax.jit(head, out_shardings=place)
        self._sums = jax.jit(sums, out_shardings=place)
        self._launch = jax.jit(lambda x: x + 1, out_shardings=place)
        self._attend = jax.jit(attend, donate_argnums=3)
        self._see = jax.jit(see)
        self._gathered = jax.jit(lambda cache, ids: jax.tree.map(lambda x: x[:, ids], cache))
        self._scattered = jax.jit(
            lambda cache, ids, new: cache.with_pages(0, ids, new), donate_argnums=0
        )
        self._cache = self._new_cache(self._num_pages)
        self._planner = AttentionPlanner.of(self._engine_config(), config, self._place)

    # ---- seconds of the parts, by the names of `layers.profile` ----

    def launch_s(self, at: int) -> float:
        return self._time(self._launch, self._ones(at))

    def rest_s(self, num_tokens: int) -> float:
        """Return the seconds of the layer without attention, with its sums over shards."""
        return self._block.rest_s(self._ones(num_tokens))

    def encode_s(self, num_tokens: int) -> float:
        """Return the seconds of the encoder layer without attention, with its sums over shards."""
        assert self._encoder is not None, "a model without an encoder"
        return self._encoder.block.rest_s(self._ones(num_tokens))

    def join_s(self, num_tokens: int) -> float:
        """Return the seconds to project encoder outputs and to write their keys and values."""
        longest = self._sizes.max_length
        whole, rest = divmod(num_tokens, longest)
        lengths = [longest] * whole + [rest] * (rest > 0)
        with self._place.in_force():
            batch = self._attention_batch(lengths, lengths)
            join = partial(self._join, self._ones(num_tokens), batch)
            seconds, self._cache = seconds_of(join, self._cache)
        return seconds

    def sums_s(self, num_tokens: int) -> float:
        return self._time(self._sums, self._ones(num_tokens))

    def head_s(self, num_rows: int) -> float:
        return self._time(partial(self._head, self._params), self._ones(num_rows))

    def prompts_s(self, num_prompts: int, length: int) -> float:
        """Return the seconds of attention in a pass over prompts of one length."""
        if self._encoder is not None:
            return self._encoder.attention_s(num_prompts, self._qkv(num_prompts * length))
        return self.attention_s([length] * num_prompts, [length] * num_prompts)

    def cross_s(self, batch: int, length: int) -> float:
        """Return the seconds of cross attention of decoding sequences to prompts of one length."""
        ones, lengths = [1] * batch, [length] * batch
        q = self._qkv(batch)[:, :, :-2].reshape(batch, -1, self._config.head_dim)
        with self._place.in_force():
            own = self._attention_batch(ones, lengths)
            rows = cross_rows(
                query_start=own.rows.query_start,
                query_length=own.rows.query_length,
                encoded_length=own.rows.context_length,
                encoded_page_table=own.rows.page_table,
            )
            own = replace(own, page=None, offset=None, rows=rows, distance_bias=None)
            return seconds_of(lambda q: self._see(q, own, self._cache), q)[0]

    def attention_s(self, num_queries: Sequence[int], lengths: Sequence[int]) -> float:
        """Return the seconds of attention of each sequence's newest queries."""
        with self._place.in_force():
            batch = self._attention_batch(num_queries, lengths)
            rope, tables = self._config.layer_ropes[0], None
            if rope is not None:
                tables = jax.device_put(
                    rope_tables(batch.positions, self._config.head_dim, rope), self._place.whole
                )
            attend = partial(self._attend, self._qkv(sum(num_queries)), tables, batch)
            seconds, (_, self._cache) = seconds_of(
                lambda out_and_cache: attend(out_and_cache[1]), (None, self._cache)
            )
        return seconds

    def busy_s(self, num_tokens: int, devices: Sequence[Any]) -> float:
        """Return the seconds while all devices compute the layer, or the encoder layer if any."""
        block = self._block if self._encoder is None else self._encoder.block
        return block.busy_s(self._ones(num_tokens), devices)

    def handoff_s(self, num_tokens: int, other: Any) -> float:
        (here,) = self._place.whole.device_set

        def there_and_back(x: Array) -> Array:
            return jax.device_put(jax.block_until_ready(jax.device_put(x, other)), here)

        return self._time(there_and_back, self._ones(num_tokens)) / 2

    def handover_s(self, num_tokens: int, other: Any) -> float:
        """Return the seconds to copy the layer's pages of `num_tokens` tokens to another device."""
        num_pages = -(-num_tokens // self._sizes.page_size)
        pages = self._pages(1, num_pages)[0].astype(np.int32)
        here, there = jnp.asarray(pages), jax.device_put(np.arange(1, num_pages + 1), other)

        def hand_over(cache: KVCache) -> KVCache:
            sent = jax.device_put(self._gathered(self._cache, here), other)
            return self._scattered(cache, there.astype(jnp.int32), sent)

        return self._time(hand_over, jax.device_put(self._new_cache(num_pages + 1), other))

    def _joining(self, block: CrossBlock) -> Any:
        """Return the compiled write of a decoder layer's keys and values of encoder outputs."""
        definition, params = nnx.split(block.cross)

        def join(params: Any, encoded: Array, batch: AttentionBatch, cache: KVCache) -> KVCache:
            context = CrossContext(0, batch, cache)
            nnx.merge(definition, params).write(encoded, context)
            return context.cache

        return partial(jax.jit(join, donate_argnums=3), params)

    def _time(self, call: Any, start: Any) -> float:
        with self._place.in_force():
            return seconds_of(call, start)[0]

    # ---- arguments ----

    def _ones(self, num_tokens: int) -> Array:
        shape = num_tokens, self._config.hidden_size
        return jax.device_put(jnp.ones(shape, self._config.dtype), self._place.whole)

    def _qkv(self, num_tokens: int) -> Array:
        config, mesh = self._config, self._place.mesh
        shape = num_tokens, config.num_kv_heads, config.group + 2, config.head_dim
        place: Any = self._place.whole
        if mesh is not None and config.num_kv_heads % self._place.num_shards == 0:
            place = NamedSharding(mesh, PartitionSpec(None, TENSOR))
        return jax.device_put(jnp.ones(shape, config.dtype), place)

    def _attention_batch(
        self, num_queries: Sequence[int], lengths: Sequence[int]
    ) -> AttentionBatch:
        queries, length = np.asarray(num_queries), np.asarray(lengths)
        page_size = self._sizes.page_size
        table = self._pages(len(length), -(-self._sizes.max_length // page_size))
        row = np.repeat(np.arange(len(length)), queries)
        starts = np.cumsum(queries) - queries
        positions = (length - queries)[row] + np.arange(len(row)) - starts[row]

        def whole(x: np.ndarray) -> Array:
            return jax.device_put(x.astype(np.int32), self._place.whole)

        return AttentionBatch(
            positions=whole(positions),
            page=whole(table[row, positions // page_size]),
            offset=whole(positions % page_size),
            rows=causal_rows(
                query_start=whole(starts),
                query_length=whole(queries),
                first_position=whole(length - queries),
                page_table=whole(table),
            ),
            max_query_length=1 if (queries == 1).all() else None,
            plan=self._plan(queries, length),
            distance_bias=self._distance_bias,
        )

    def _plan(self, queries: np.ndarray, length: np.ndarray) -> Plan | None:
        """Return the attention plan of rows; None for kernels that need none."""
        if self._planner is None:
            return None
        rows = [
            Row(i, i, start, num, 0)
            for i, (start, num) in enumerate(
                zip((length - queries).tolist(), queries.tolist(), strict=True)
            )
        ]
        if (queries == 1).all():
            return self._planner.decode(rows, range(len(rows)))
        batch, _ = pack_rows(self._engine_config(), rows, int(queries.sum()))
        return self._planner.mixed(batch)

    # ---- pages ----

    def _pages(self, num_rows: int, num_pages: int) -> np.ndarray:
        """Return a page table; sequences share pages where the pool is too small."""
        most = self._num_pages - 1
        return (1 + np.arange(num_rows * num_pages) % most).reshape(num_rows, num_pages)

    @property
    def _num_pages(self) -> int:
        sizes = self._sizes
        wanted = sizes.max_batch * -(-sizes.max_length // sizes.page_size)
        pages = jax.tree.leaves(jax.eval_shape(lambda: self._empty(1)))
        page_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in pages)
        return 1 + max(1, min(wanted, _KV_BYTES // page_bytes))

    def _empty(self, num_pages: int) -> KVCache:
        dtype = self._sizes.kv_dtype or self._config.dtype
        shards = self._place.num_shards
        return empty_cache(
            self._config, num_pages, self._sizes.page_size, dtype, "unrolled", shards
        )

    def _new_cache(self, num_pages: int) -> KVCache:
        places = self._place.cache(self._config)
        return jax.jit(partial(self._empty, num_pages), out_shardings=places)()

    def _engine_config(self) -> EngineConfig:
        sizes = self._sizes
        return EngineConfig(
            page_size=sizes.page_size,
            num_pages=self._num_pages,
            max_slots=max(sizes.max_batch, sizes.max_tokens),
            max_context=sizes.max_length,
            max_step_tokens=max(sizes.max_tokens, sizes.max_batch),
            kv_dtype=sizes.kv_dtype,
            has_encoder=self._config.has_encoder,
        )


def degrees_of(config: DecoderConfig, devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that divide a model's layers, up to all devices."""
    found = []
    for degree in range(1, len(devices) + 1):
        try:
            check_fits(make_mesh(tensor=degree, devices=devices), config)
        except InvalidConfigError:
            continue
        found.append(degree)
    return tuple(found)


@final
class LayerBench:
    """A `LayerTimer` of a model's first layer with full attention, with random weights.

    For an encoder-decoder model it times the first encoder layer and the first decoder layer. A
    degree d (of `degrees`, by default all that `degrees_of` returns) uses the first d devices.

    Raises:
      InvalidConfigError: a degree does not divide the layer or exceeds the number of devices, or
        the model has recurrent layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        sizes: LayerSizes,
        devices: Sequence[Any],
        degrees: Sequence[int] | None = None,
    ):
        if config.num_recurrent_layers:
            raise InvalidConfigError(
                "layers of a model with recurrent layers are not measured yet; pass a model with "
                "attention in all layers"
            )
        allowed = degrees_of(config, devices)
        if degrees is not None and not set(degrees) <= set(allowed):
            raise InvalidConfigError(
                f"degrees {list(degrees)} are not allowed; this model on {len(devices)} devices "
                f"can have {list(allowed)}"
            )
        self._config = one_layer(config)
        self._devices = devices
        self._layers: dict[int, ShardedLayer] = {}
        self.sizes = sizes
        self.degrees = allowed if degrees is None else tuple(degrees)
        self.num_devices = len(devices)

    def seconds(self, part: str, degree: int, at: int) -> float:
        layer = self._layer(degree)
        num_prompts = max(1, self.sizes.max_tokens // at)
        timed = {
            parts.LAUNCH: lambda: layer.launch_s(at),
            parts.REST: lambda: layer.rest_s(at),
            parts.ENCODE: lambda: layer.encode_s(at),
            parts.JOIN: lambda: layer.join_s(at),
            parts.SUMS: lambda: layer.sums_s(at),
            parts.HEAD: lambda: layer.head_s(at),
            parts.PROMPT: lambda: layer.prompts_s(1, at),
            parts.PROMPTS: lambda: layer.prompts_s(num_prompts, at),
            parts.BUSY: lambda: layer.busy_s(self.sizes.max_tokens, self._devices[:at]),
            parts.HANDOFF: lambda: layer.handoff_s(at, self._devices[1]),
            parts.HANDOVER: lambda: layer.handover_s(at, self._devices[1]),
        }
        return timed[part]()

    def batch_s(self, part: str, degree: int, batch: int, length: int) -> float:
        layer = self._layer(degree)
        if part == parts.CROSS:
            return layer.cross_s(batch, length)
        return layer.attention_s([1] * batch, [length] * batch)

    def _layer(self, degree: int) -> ShardedLayer:
        if degree not in self._layers:
            self._layers[degree] = ShardedLayer(self._config, self.sizes, self._devices[:degree])
        return self._layers[degree]
