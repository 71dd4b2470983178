"""Seconds of compiling an 8B model for an H100, without one: `python -m scripts.compile_times`.

`make compile-times` runs it with JAX's CUDA plug-in. The executables are those that a runtime with
the defaults of GPUs compiles, and the small ones that move slots and pages. They are compiled
sequentially, and on the threads of a start, each time in a new process without any cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Self, cast, final

from benchmarks.common.harness import Benchmark, of_options, option
from jaxserve.core.errors import InvalidConfigError

# Vocabulary, hidden and intermediate size, layers, heads and KV heads.
SHAPES = {"8b": (128256, 4096, 14336, 32, 32, 8), "small": (512, 256, 512, 2, 4, 2)}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_layers", "num_heads", "num_kv_heads"),
)
WAYS = ("serial", "parallel")
_NUM_PAGES = 4000


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """The model and target of a compilation.

    Attributes:
      target: "h100", or "cpu" for this machine.
      layout: of the layers.
      first: only what a request that runs alone waits for.
    """

    target: str
    shape: str
    layout: str
    max_slots: int
    max_step_tokens: int
    max_decode_iterations: int
    first: bool


def run(options: argparse.Namespace) -> dict[str, Any]:
    job = of_options(Job, options)
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise InvalidConfigError(f"--ways {unknown} are unknown; pass some of {', '.join(WAYS)}")
    return {
        "repeats": 1,
        "num_cores": os.cpu_count(),
        **{way: _in_new_process(job, way) for way in ways},
    }


def _in_new_process(job: Job, way: str) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(compiled, job, way).result()


def compiled(job: Job, way: str) -> dict[str, Any]:
    """Compile everything, and return the seconds of the whole and of each executable.

    Tracing and lowering count. On threads, an executable's seconds are those that pass until it is
    made; other executables take part of them.
    """
    from tqdm import tqdm

    from jaxserve.steps.preparation import Preparation

    seconds: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def call() -> None:
            begin_s = time.perf_counter()
            function()
            seconds[name] = time.perf_counter() - begin_s

        return name, call

    steps = [timed(*step) for step in _steps(job)]
    begin_s = time.perf_counter()
    with tqdm(total=len(steps), desc=f"compiling, {way}", leave=False) as bar:
        if way == "parallel":
            for name in Preparation(steps).finished():
                bar.set_postfix_str(name)
                bar.update()
        else:
            for name, step in steps:
                bar.set_postfix_str(name)
                step()
                bar.update()
    return {
        "wall_s": time.perf_counter() - begin_s,
        "sum_s": sum(seconds.values()),
        "executables": seconds,
    }


def _steps(job: Job) -> list[Any]:
    if job.target != "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on a GPU, even if there is one
    import jax
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxserve.core.config import EngineConfig
    from jaxserve.execution.device import DeviceWarmup
    from jaxserve.models.batch import empty_cache
    from jaxserve.models.families.llama import Llama, LlamaConfig
    from jaxserve.steps.programs import Programs
    from jaxserve.steps.slots import empty_slots
    from jaxserve.steps.step_function import Placement
    from scripts.gate_device import mesh_of

    config = LlamaConfig(
        **cast(Any, dict(zip(_SIZES, SHAPES[job.shape], strict=True))),
        head_dim=128 if job.target == "h100" else 64,
        max_position_embeddings=8192,
        dtype="bfloat16" if job.target == "h100" else "float32",
    )
    engine = EngineConfig(
        num_pages=_NUM_PAGES,
        max_slots=job.max_slots,
        max_context=8192,
        max_step_tokens=job.max_step_tokens,
        max_decode_iterations=job.max_decode_iterations,
    )
    layout = cast(Any, job.layout)
    mesh = mesh_of() if job.target == "h100" else Mesh(jax.devices()[:1], ("tensor",))
    place = Placement.like(NamedSharding(mesh, PartitionSpec()))
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: Llama(config, rngs=None, layer_layout=layout))
    )
    with place.in_force():
        programs = Programs(graphdef, engine, config, place)

    def at(sharding: jax.sharding.Sharding, tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    cache = jax.eval_shape(
        lambda: empty_cache(config, _NUM_PAGES, engine.page_size, config.dtype, layout)
    )
    stage = _Shapes(
        programs,
        at(place.whole, params),
        jax.tree.map(at, place.cache(config), cache),
        at(place.whole, jax.eval_shape(lambda: empty_slots(engine))),
    )
    warmup = DeviceWarmup(engine, cast(Any, stage))
    steps = warmup.steps()
    return steps[: warmup.num_first] if job.first else steps


@final
@dataclass(frozen=True)
class _Shapes:
    """The shapes of a stage that `DeviceWarmup` reads, and of its pages, slots and states."""

    programs: Any
    params: Any
    cache: Any
    state: Any

    @property
    def arrays(self) -> Any:
        from jaxserve.steps.step_function import as_list

        return as_list(self.params)

    @property
    def pages(self) -> Self:
        return self

    slots = states = pages

    def preparations(self, *_: Any) -> tuple[()]:
        return ()

    def preparations_for_grammars(self) -> tuple[()]:
        return ()

    def abstract_incoming(self, num_pages: int) -> None:
        return None


OPTIONS = (
    option("--target", "h100", "what is compiled for", choices=("h100", "cpu")),
    option("--shape", "8b", "of the Llama", choices=tuple(SHAPES)),
    option("--layout", "unrolled", "of the layers", choices=("unrolled", "scanned")),
    option("--max-slots", 256, "most sequences at once"),
    option("--max-step-tokens", 2048, "most tokens of one step"),
    option("--max-decode-iterations", 16, "of one decode loop"),
    option("--first", False, "only what a request that runs alone waits for"),
    option("--ways", ",".join(WAYS), "which to measure, separated by commas"),
)
main = Benchmark(__doc__, run, OPTIONS, "compile_times")


if __name__ == "__main__":
    sys.exit(main())
