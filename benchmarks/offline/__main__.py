"""Throughput of requests that arrive all at once: `python -m benchmarks.offline --help`.

Answers have exactly the workload's lengths, which the scheduler does not know.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import Figures, repeats, summary
from benchmarks.common.roofline import bound, measure_machine
from benchmarks.common.serving import answered
from benchmarks.common.timing import full_step_s, seconds
from benchmarks.offline.peers.compare import OPTIONS as PEER_OPTIONS
from benchmarks.offline.peers.compare import peers_of, run_peers
from benchmarks.startup.starts import start_times
from jaxserve.core.config import EngineConfig
from jaxserve.core.metrics import summarise
from jaxserve.kernels import Rows, matmul, panel_matmul, to_panels
from jaxserve.models.batch import AttentionBatch, KVCache, empty_cache
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.steps.sampling.sampler import Variant, sample
from jaxserve.steps.slots import empty_slots
from jaxserve.workload import WorkloadItem, random_items

if TYPE_CHECKING:
    from jaxserve.report import Report
    from jaxserve.runtime import Runtime


def step_parts(
    config: LlamaConfig,
    engine: EngineConfig,
    dtype: jax.typing.DTypeLike,
    *,
    weights_dtype: str,
    step_s: float,
    batch_size: int,
    context: int,
) -> dict[str, float]:
    """Return the seconds of one decode iteration: in the run, its parts alone, and the rest.

    Parts have random weights and a cache of their own. `other_s` is the rest: norms, rotary
    embedding, activations, calls.
    """
    slots = jax.tree.map(lambda leaf: leaf[:batch_size], empty_slots(engine))
    logits = jax.random.normal(jax.random.key(0), (batch_size, config.vocab_size))
    greedy = jax.jit(partial(sample, variant=Variant.GREEDY))
    parts = {
        "products_s": _products_s(config, dtype, weights_dtype, batch_size),
        "attention_s": _attention_s(config, engine, dtype, batch_size, context),
        "sampling_s": seconds(greedy, logits, slots.sampling, slots.tokens, slots.length),
    }
    return {"step_s": step_s, **parts, "other_s": step_s - sum(parts.values())}


def _products_s(
    config: LlamaConfig, dtype: jax.typing.DTypeLike, weights_dtype: str, batch_size: int
) -> float:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    inner, num_qkv = config.intermediate_size, heads + 2 * config.num_kv_heads * config.head_dim
    sizes = ((hidden, num_qkv), (heads, hidden), (hidden, 2 * inner), (inner, hidden))
    keys = iter(jax.random.split(jax.random.key(0), 4 * config.num_layers + 1))
    in_panels = jax.default_backend() == "cpu" and jnp.dtype(dtype) == jnp.float32
    arrange = (
        jax.jit(partial(to_panels, dtype=weights_dtype)) if in_panels else lambda weight: weight
    )

    def weight(depth: int, columns: int) -> jax.Array:
        drawn = jax.random.normal(next(keys), (depth, columns), dtype)
        return arrange(drawn * (0.1 / depth**0.5))

    def times(x: jax.Array, weight: jax.Array, columns: int) -> jax.Array:
        return panel_matmul(x, weight, columns=columns) if in_panels else matmul(x, weight)

    layers = [[weight(*size) for size in sizes] for _ in range(config.num_layers)]
    vocab = weight(hidden, config.vocab_size)

    @jax.jit
    def products(x: jax.Array, layers: list, vocab: jax.Array) -> jax.Array:
        for layer in layers:
            for weight, (depth, columns) in zip(layer, sizes, strict=True):
                x = times(x[:, :depth], weight, columns)
        return times(x, vocab, config.vocab_size)

    return seconds(products, jnp.ones((batch_size, hidden), dtype), layers, vocab)


def _attention_s(
    config: LlamaConfig,
    engine: EngineConfig,
    dtype: jax.typing.DTypeLike,
    batch_size: int,
    context: int,
) -> float:
    page_size, kv_dtype = engine.page_size, engine.kv_dtype or dtype
    pages_each = -(-context // page_size)
    num_pages = batch_size * pages_each
    held = [empty_cache(config, 1 + num_pages, page_size, kv_dtype, "unrolled")]
    table = 1 + jnp.arange(num_pages).reshape(batch_size, pages_each)
    row, last = jnp.arange(batch_size), jnp.full(batch_size, context - 1)
    rows = Rows(
        query_start=row,
        query_length=jnp.ones_like(row),
        first_position=last,
        context_length=last + 1,
        page_table=table,
    )
    batch = AttentionBatch(
        positions=last,
        page=table[row, last // page_size],
        offset=last % page_size,
        rows=rows,
        max_query_length=1,
    )
    group = config.num_heads // config.num_kv_heads
    qkv = jnp.ones((batch_size, config.num_kv_heads, group + 2, config.head_dim), dtype)

    @partial(jax.jit, donate_argnums=0)
    def attend(cache: KVCache) -> tuple[KVCache, jax.Array]:
        total = jnp.zeros((batch_size, config.num_heads, config.head_dim), dtype)
        for layer, window in enumerate(config.sliding_windows):
            out, cache = cache.attend(layer, qkv, None, batch, sliding_window=window)
            total += out
        return cache, total

    def call() -> jax.Array:
        held[0], total = attend(held[0])
        return total

    return seconds(call)


WORKLOADS = ("sharegpt", "random")


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve import Runtime
    from jaxserve.execution.sizes import platform_defaults

    peers = peers_of(options)
    settings = _runtime_settings(options)
    starts = start_times(options.model, settings) if options.cold else None
    begin_s = time.perf_counter()
    with Runtime.from_pretrained(options.model, warmup="full", **settings) as rt:
        ready_s = time.perf_counter() - begin_s
        items = _workload(options, rt)
        runs = [_run_once(rt, items) for _ in range(options.repeats)]
        # Measured before the weights of the bound add to it.
        peak_host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        config: Any = rt.model_config
        engine, report = rt.config, rt.report()
    dtype = options.dtype or platform_defaults().dtype
    figures = summary(runs)
    # Keys and values are in bfloat16 if weights are.
    is_narrow = options.quantize in (None, "bf16") and engine.kv_dtype == "bfloat16"
    quantize = "bf16" if is_narrow else options.quantize
    return {
        **{name: getattr(options, name) for name in ("workload", "num_requests", "seed", "model")},
        "precision": dtype if engine.kv_dtype is None else f"{dtype} with KV in {engine.kv_dtype}",
        "quantize": quantize,
        "policy": options.policy,
        "settings": settings,
        **figures,
        "peak_host_bytes": peak_host_bytes,
        "startup_s": ready_s,
        "startup": starts,
        **_compared_with_bound(config, engine, report, dtype, quantize, figures),
        "compare": run_peers(options, peers, items, batch_size=engine.max_slots, settings=settings),
    }


def _run_once(rt: Runtime, items: list[WorkloadItem]) -> Figures:
    prompts = [list(item.prompt_token_ids) for item in items]
    params = [item.params() for item in items]
    figures, engine, done = answered(rt, prompts, params, progress=True)
    return {
        **summarise(done, figures["wall_s"]),
        "host_gap_share": engine["host_gap_s"] / engine["busy_s"],
        "engine": engine,
    }


def _compared_with_bound(
    config: LlamaConfig,
    engine: EngineConfig,
    report: Report,
    dtype: str,
    quantize: str | None,
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Return the machine's bound, the share that the median run reached, and a step's parts.

    Parts are not known for weights in less than 16 bits.
    """
    print("timing the machine and the parts of a step", file=sys.stderr)
    batch_size = min(engine.max_slots, figures["num_requests"])
    num_prompt, num_output = figures["prompt_tokens"], figures["output_tokens"]
    context = (num_prompt + num_output / 2) / figures["num_requests"]
    machine = measure_machine(dtype)
    roof = bound(
        machine,
        config,
        dtype,
        kv_dtype=engine.kv_dtype,
        batch_size=batch_size,
        context=context,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
    )
    parts, step_s = None, full_step_s(report.steps, batch_size)
    if step_s and quantize in (None, "bf16"):
        sizes = {"batch_size": batch_size, "context": round(context)}
        weights_dtype = dtype if quantize is None else "bfloat16"
        parts = step_parts(
            config, engine, dtype, weights_dtype=weights_dtype, step_s=step_s, **sizes
        )
    return {
        "machine": asdict(machine),
        "bound": {
            **asdict(roof),
            "output_tokens_per_s": num_output / roof.run_s,
            "reached": roof.run_s / figures["wall_s"],
        },
        "decode_step": parts,
    }


def _workload(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    if options.workload == "random":
        return random_items(
            options.num_requests,
            num_prompt_tokens=options.prompt_tokens,
            num_output_tokens=options.output_tokens,
            vocab_size=rt.model_config.vocab_size,
            seed=options.seed,
        )
    from jaxserve.workload import sharegpt

    assert rt.tokenizer is not None, "a registered model has a tokenizer"
    return sharegpt.sample(
        options.num_requests,
        options.seed,
        tokenizer=rt.tokenizer,
        max_prompt_tokens=options.max_prompt_tokens,
        max_output_tokens=options.max_output_tokens,
    )


def _runtime_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = "policy load dtype quantize kv_memory kv_dtype max_slots max_context max_step_tokens"
    given = {name: getattr(options, name) for name in names.split()}
    return {name: value for name, value in given.items() if value is not None}


OPTIONS = (
    option("--workload", "sharegpt", "what is asked", choices=WORKLOADS),
    option("--num-requests", 64, "how many, all at once"),
    option("--seed", 0, "of the workload's draw"),
    option("--max-prompt-tokens", 512, "sharegpt: longer prompts are left out"),
    option("--max-output-tokens", 256, "sharegpt: longer answers are cut"),
    option("--prompt-tokens", 64, "random: of each prompt"),
    option("--output-tokens", 64, "random: of each answer"),
    option("--model", "smollm2-135m", "a name, folder or GGUF file"),
    option("--policy", "auto", "scheduling preset"),
    option("--load", None, "random for random weights"),
    option("--dtype", None, "of weights and cache"),
    option("--quantize", None, "weights in few bits: bf16, int8, int4, or keep a GGUF's blocks"),
    option("--kv-memory", None, 'size of the page pool, e.g. "1GiB"'),
    option(
        "--kv-dtype", None, "of keys and values, if not --dtype's: int8, float8_e4m3fn, bfloat16"
    ),
    option("--max-slots", None, "most sequences at once", int),
    option("--max-context", 1024, "most tokens of prompt and answer"),
    option("--max-step-tokens", None, "most tokens of one step", int),
    option("--cold", False, "also time a cold and a warm start in new processes"),
    repeats("engine"),
    *PEER_OPTIONS,
)
main = Benchmark(__doc__, run, OPTIONS, "offline")


if __name__ == "__main__":
    sys.exit(main())
