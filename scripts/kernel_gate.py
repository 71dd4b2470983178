"""Compile the GPU kernels, and steps with them, without a GPU; `make kernel-gate` runs it.

It runs in its own environment, with JAX's CUDA plug-in, and compiles every configuration of the
kernels to machine code for an H100, or for another GPU (`--device`). Errors are a register spill,
more shared memory than the device has, a cache that is not updated in place, and temporaries of the
cache's size. On other GPUs than an H100, whose assembler gives up a few registers to run more
blocks at once, a few bytes may be spilled. A configuration that no kernel of ours serves on the
device is listed.

It also compiles a whole decode loop and a whole mixed step, with unrolled and with scanned layers,
with pages in the model's dtype and in 8 bits, with weights in few bits, of Llama 3 8B's sizes on
one device and over eight, and of layers of Qwen3 30B-A3B and Mixtral 8x7B, whose products may take
1.2 times the operations that their tokens need (`scripts.traffic`); and a task of cells whose
kernel reads their pools. A layer, the rest of an iteration or a task may not have more launches
than `kernel_gate.json` records, and the host may not do more for a decode loop
(`scripts.launches`). A step with unrolled layers, the default, may read and write at most 5 % of
its weights' bytes in addition to the weights, pages and activations. A decode loop with weights in
few bits may not copy a weight. In a deterministic step, XLA itself may not add floating-point
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

_DUMP = tempfile.TemporaryDirectory(prefix="jaxserve-gate-")
# With --subset every third configuration: these have every kernel, head size and dtype of pages.
_EVERY = 3
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_dump_to={_DUMP.name}",
        "--xla_dump_hlo_as_text",
    )
)

import jax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from tqdm import tqdm  # noqa: E402

from jaxserve.cells.layout import CellLayout  # noqa: E402
from jaxserve.cells.models import LSTM, Embedded, sequence_model  # noqa: E402
from jaxserve.cells.programs import CellPrograms  # noqa: E402
from jaxserve.core.config import EngineConfig  # noqa: E402
from jaxserve.core.options import KV_DTYPES, RuntimeOptions  # noqa: E402
from jaxserve.kernels import dispatch  # noqa: E402
from jaxserve.kernels.configurations import CONFIGURATIONS, Configuration  # noqa: E402
from jaxserve.kernels.gpu import GPUS, Gpu  # noqa: E402
from jaxserve.kernels.paged_attention.configurations import (  # noqa: E402
    RARE_CONFIGURATIONS,
)
from jaxserve.kernels.paged_attention.configurations import (  # noqa: E402
    Configuration as Attention,
)
from jaxserve.models.batch import empty_cache  # noqa: E402
from jaxserve.models.config import DecoderConfig  # noqa: E402
from jaxserve.models.decoder import Decoder, LayerLayout  # noqa: E402
from jaxserve.models.families.llama import LlamaConfig  # noqa: E402
from jaxserve.models.families.moe import MoEConfig  # noqa: E402
from jaxserve.models.linear import replace_weights  # noqa: E402
from jaxserve.models.quantisation import Quantisation  # noqa: E402
from jaxserve.models.quantised import QuantisedWeight  # noqa: E402
from jaxserve.models.routing import ExpertsConfig  # noqa: E402
from jaxserve.sharding import state_shardings  # noqa: E402
from jaxserve.steps.programs import Programs  # noqa: E402
from jaxserve.steps.sampling.sampler import Variant  # noqa: E402
from jaxserve.steps.step_function import Placement  # noqa: E402
from scripts.gate_device import mesh_of, ptxas, spills  # noqa: E402
from scripts.launches import (  # noqa: E402
    HostThunks,
    host_thunks,
    launches,
    launches_a_layer,
    made_arrays,
    newest_dump,
    sums_of_floats,
)
from scripts.traffic import StepBytes, product_flops, step_bytes  # noqa: E402

_ALL = (*CONFIGURATIONS, *RARE_CONFIGURATIONS)
# File with the launches of a layer on an H100 that were recorded last.
KNOWN = Path(__file__).with_name("kernel_gate.json")
_MOSAIC = "mosaic,triton"

# The kernel of decoding rows, by the option `attention`.
_SPLIT_KERNELS = {None: "paged_attention_split", _MOSAIC: "paged_attention_mosaic_split"}
# Maximum share of its weights' bytes that a step with unrolled layers moves beyond its needs.
_MAX_SHARE_BESIDE = 0.05
# Maximum bytes of temporaries of one call for each multiprocessor; the largest are attention's
# partial results, of which each has its own.
_MAX_TEMPORARY_BYTES = 1 << 20
# Maximum bytes of registers that a thread may spill on other GPUs than an H100; a tile that is too
# large spills kilobytes.
_MAX_SPILLED_BYTES = 64
# The option of XLA with which a kernel that spills registers is an error, and a part of that error.
_NO_SPILLS, _SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling", "register spilling"
# Maximum operations of a step with experts, beside those that its tokens need.
_MAX_FLOPS = 1.2
# Attributes of models with experts; `num_layers` and what the steps have in common are missing.
_MIXTURES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "Qwen3 30B-A3B": dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_heads=32,
            num_kv_heads=4,
            qk_norm=True,
            experts=ExpertsConfig(num=128, size=768, per_token=8),
        ),
        "Mixtral 8x7B": dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            experts=ExpertsConfig(num=8, size=14336, per_token=2),
        ),
    }
)
_MAX_STEP_TOKENS = 512


@final
@dataclass(frozen=True)
class Steps:
    """A mixed step and a decode loop.

    Attributes:
      layout: layout of the layers; unrolled layers compile far more slowly.
      kv_dtype: dtype of pages; None for the model's dtype.
      dtype: dtype of the model.
      attention: the option `attention`; None for the platform's choice.
      quantize: the option `quantize`; None for weights in the model's dtype.
      deterministic: the option `deterministic`.
      is_llama_3_8b: whether it has the sizes of Llama 3 8B; otherwise a small Llama's.
      num_shards: devices over which its tensors are split.
      max_slots: rows of the decode loop.
      mixture: the model in `_MIXTURES` whose sizes it has; None for a Llama.
    """

    layout: LayerLayout
    kv_dtype: str | None = None
    dtype: str = "bfloat16"
    attention: str | None = None
    quantize: str | None = None
    deterministic: bool = False
    is_llama_3_8b: bool = False
    num_shards: int = 1
    max_slots: int = 64
    mixture: str | None = None

    def runs_on(self, gpu: Gpu) -> bool:
        """Return whether our kernels serve the step there; its other kernels are not checked."""
        is_float8 = "float8_e4m3fn" == self.kv_dtype or self.quantize == "fp8"
        is_mosaic = self.attention == _MOSAIC
        return not (is_mosaic and not gpu.has_mosaic or is_float8 and gpu.capability < (8, 9))

    @property
    def num_layers(self) -> tuple[int, int]:
        """Two numbers of layers; what a layer adds is known from the difference."""
        if self.mixture is not None:
            return 1, 2
        return (2, 3) if self.is_llama_3_8b else (3, 5)

    def config(self, num_layers: int) -> DecoderConfig:
        common: dict[str, Any] = dict(
            num_layers=num_layers, head_dim=128, max_position_embeddings=4096, dtype=self.dtype
        )
        if self.mixture is not None:
            return MoEConfig(**_MIXTURES[self.mixture], **common)
        sizes = (128256, 4096, 14336, 32, 8) if self.is_llama_3_8b else (32000, 1024, 2816, 8, 2)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        common.update(zip(names, sizes, strict=True))
        return LlamaConfig(**common)

    def __str__(self) -> str:
        parts = ["Llama 3 8B"] if self.is_llama_3_8b else []
        parts += [] if self.mixture is None else [self.mixture]
        parts += [self.layout]
        parts += [] if self.num_shards == 1 else [f"{self.num_shards} devices"]
        parts += [] if self.max_slots == 64 else [f"{self.max_slots} slots"]
        parts += [] if self.kv_dtype is None else [f"{self.kv_dtype} pages"]
        parts += [] if self.dtype == "bfloat16" else [self.dtype]
        parts += [] if self.attention is None else [self.attention]
        parts += [] if self.quantize is None else [f"{self.quantize} weights"]
        parts += ["deterministic"] if self.deterministic else []
        return ", ".join(parts)


_LLAMA_3_8B = tuple(
    Steps("unrolled", kv_dtype, is_llama_3_8b=True, num_shards=num_shards)
    for num_shards in (1, 8)
    for kv_dtype in (None, "float8_e4m3fn")
)
STEPS_OF_SUBSET = (
    Steps("unrolled"),
    _LLAMA_3_8B[0],
    Steps("scanned"),
    Steps("unrolled", quantize="int4"),
    Steps("unrolled", mixture="Qwen3 30B-A3B"),
    Steps("unrolled", mixture="Mixtral 8x7B"),
    Steps("unrolled", deterministic=True, is_llama_3_8b=True),
)
STEPS = (
    *STEPS_OF_SUBSET,
    *_LLAMA_3_8B[1:],
    *(Steps("unrolled", kv_dtype) for kv_dtype in KV_DTYPES),
    Steps("unrolled", is_llama_3_8b=True, max_slots=256),
    *(Steps("scanned", kv_dtype) for kv_dtype in KV_DTYPES),
    Steps("scanned", dtype="float32"),
    Steps("scanned", attention=_MOSAIC),
    Steps("unrolled", attention=_MOSAIC, is_llama_3_8b=True),
    *(Steps("unrolled", quantize=kind) for kind in ("int8", "fp8", "w8a8")),
    Steps("scanned", quantize="int4"),
    Steps("scanned", deterministic=True, dtype="float32"),
    Steps("unrolled", deterministic=True, mixture="Qwen3 30B-A3B"),
)


def main() -> int:
    options = _parser().parse_args()
    if options.write and (options.device != "h100" or options.no_steps or options.only):
        _parser().error("--write records everything on an H100: pass no other option")
    if options.device == "h100":  # in steps, too; XLA reads this when it compiles first
        os.environ["XLA_FLAGS"] += f" --{_NO_SPILLS}=true"
    gpu = GPUS[options.device]
    chosen = [_for(gpu, each) for each in (_subset() if options.subset else _ALL)]
    chosen = [each for each in chosen if options.only in str(each)]
    refused: dict[str, str] = {}
    spilled: dict[str, dict[str, int]] = {}
    problems = _compile_configurations(options.device, chosen, refused, spilled)
    if options.device == "h100":
        problems += [f"{name}: no kernel serves it: {why}" for name, why in refused.items()]
    all_steps = [each for each in STEPS if each.runs_on(gpu)]
    steps = [each for each in all_steps if each in STEPS_OF_SUBSET or not options.subset]
    steps = [] if options.no_steps else steps
    counts = _Counts()
    for each in tqdm(steps, desc="compiling steps", delay=2):
        _compile_steps(options.device, each, problems, counts)
    found = {
        "launches a layer": counts.layers,
        "launches beside the layers": counts.rest,
        "host decisions of a loop": counts.decisions,
        "host launches of a loop": counts.host_launches,
        "launches a task": {} if options.no_steps else _compile_tasks(options.device, problems),
    }
    shared = _shared_bytes()
    problems += [
        f"{kernel}: {size} bytes of shared memory, of {gpu.shared_bytes}"
        for kernel, size in shared.items()
        if size > gpu.shared_bytes
    ]
    # Launches on other devices are shown, and compared with nothing.
    if options.write:
        KNOWN.write_text(json.dumps(found, indent=2) + "\n")
    before = json.loads(KNOWN.read_text()) if options.device == "h100" else found
    problems += [
        f"{name}: {count:g} {what}, {before[what].get(name, 0):g} before"
        for what, counts in found.items()
        for name, count in counts.items()
        if count > before[what].get(name, 0)
    ]
    summary = {
        "device": options.device,
        "configurations": f"{len(chosen)} of {len(_ALL)}",
        "served by other implementations": refused,
        "bytes of registers spilled": spilled,
        "steps": f"{2 * len(steps)} of {2 * len(all_steps)}",
        **found,
        "thunks of a loop": {name: asdict(each) for name, each in counts.thunks.items()},
        "bytes a step": {name: asdict(each) for name, each in counts.moved.items()},
        "share beside": {name: round(each.share_beside, 3) for name, each in counts.moved.items()},
        "most bytes of shared memory": shared,
    }
    print(json.dumps(summary, indent=2))
    for problem in problems:
        print(f"kernel-gate: {problem}", file=sys.stderr)
    print(
        f"kernel-gate: {len(chosen)} configurations of kernels and {2 * len(steps)} steps were "
        f"compiled for {options.device}, on which {len(refused)} configurations have no kernel; "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


@final
@dataclass(frozen=True)
class _Counts:
    """Counts of compiled steps, by their names.

    Attributes:
      rest: launches of an iteration outside its layers.
      decisions, host_launches: of the host, see `HostThunks`; graphs are launches too.
    """

    layers: dict[str, float] = field(default_factory=dict)
    rest: dict[str, float] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    host_launches: dict[str, int] = field(default_factory=dict)
    thunks: dict[str, HostThunks] = field(default_factory=dict)
    moved: dict[str, StepBytes] = field(default_factory=dict)


def _subset() -> list[Configuration]:
    """Return every third configuration of attention, which compile slowly, and all other ones."""
    attention = [c for c in CONFIGURATIONS if isinstance(c, Attention)]
    others = [c for c in CONFIGURATIONS if not isinstance(c, Attention)]
    return [*attention[::_EVERY], *others]


def _for(gpu: Gpu, configuration: Configuration) -> Configuration:
    """Return a configuration for a GPU; attention has tiles by the device."""
    is_attention = isinstance(configuration, Attention)
    return replace(configuration, gpu=gpu) if is_attention else configuration


def _compile_configurations(
    device: str,
    configurations: Sequence[Configuration],
    refused: dict[str, str],
    spilled: dict[str, dict[str, int]],
) -> list[str]:
    """Return what is wrong.

    Add the configurations that no kernel serves to `refused`, with the reason, and those that spill
    few registers to `spilled`, with the bytes of each kernel.
    """
    problems, mesh = [], mesh_of(device)
    most_spilled = 0 if device == "h100" else _MAX_SPILLED_BYTES
    place = NamedSharding(mesh, PartitionSpec())
    for configuration in tqdm(configurations, desc="compiling kernels", delay=2):
        function, arguments = configuration.call()
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
        )
        donated = sum(_num_bytes(arguments[name]) for name in configuration.donated)
        step = jax.jit(function, donate_argnames=configuration.donated)
        with jax.set_mesh(mesh), dispatch.noted() as choices:
            try:
                lowered = step.lower(**arguments)
                try:
                    compiled = lowered.compile({_NO_SPILLS: True})
                except jax.errors.JaxRuntimeError as error:
                    if _SPILLS not in str(error):
                        raise
                    compiled, own = _compiled_with_spills(lowered)
                    spilled[str(configuration)] = own
                    problems += [
                        f"{configuration}: {kernel} spills {size} bytes of registers"
                        for kernel, size in own.items()
                        if size > most_spilled
                    ]
            except NotImplementedError as error:  # of a kernel that was asked for by name
                refused[str(configuration)] = str(error)
            except Exception as error:
                problems.append(f"{configuration}: {str(error).splitlines()[0]}")
            else:
                if choices and all(each.implementation == "xla" for each in choices):
                    refused[str(configuration)] = choices[0].reason
                    continue  # XLA's temporaries are not a kernel's
                problems += _memory_problems(device, str(configuration), compiled, donated)
    return problems


def _compiled_with_spills(
    lowered: jax.stages.Lowered,
) -> tuple[jax.stages.Compiled, dict[str, int]]:
    """Compile a program that spills, and return the bytes that a thread of each kernel spills."""
    before = set(Path(_DUMP.name).glob("*.ptx"))
    compiled = lowered.compile({_NO_SPILLS: False, "xla_dump_emitter_re": ".*"})
    spilled = {}
    for path in sorted(set(Path(_DUMP.name).glob("*.ptx")) - before):
        target = re.findall(r"^\.target (\w+)", path.read_text(), re.M)[0]
        done = subprocess.run(
            [ptxas(), "-v", f"-arch={target}", path, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
        spilled |= spills(done.stderr)
    return compiled, spilled


def _compile_steps(device: str, steps: Steps, problems: list[str], counts: _Counts) -> None:
    num_few, num_more = steps.num_layers
    more = _modules(device, steps, num_more, problems)
    for name, hlo in more.items():
        own = counts.moved[name] = step_bytes(hlo)
        if steps.layout == "unrolled" and own.share_beside > _MAX_SHARE_BESIDE:
            problems.append(
                f"{name}: {own.beside} bytes beside those of the weights ({own.weights}), "
                "activations and pages"
            )
    loop = f"decode loop, {steps}"
    thunks = counts.thunks[loop] = host_thunks(newest_dump(Path(_DUMP.name), "decode_loop"))
    counts.decisions[loop] = thunks.decisions
    counts.host_launches[loop] = thunks.launches + thunks.graphs
    if steps.layout == "scanned":
        counts.layers.update((name, launches_a_layer(hlo, num_more)) for name, hlo in more.items())
        return
    few = _modules(device, steps, num_few, problems)
    for name in more:
        layer = (launches(more[name]) - launches(few[name])) / (num_more - num_few)
        counts.layers[name] = layer
        counts.rest[name] = launches(more[name]) - num_more * layer


def _modules(device: str, steps: Steps, num_layers: int, problems: list[str]) -> dict[str, str]:
    config = steps.config(num_layers)
    engine = EngineConfig(
        num_pages=4000,
        max_slots=steps.max_slots,
        max_context=4096,
        max_step_tokens=_MAX_STEP_TOKENS,
        kv_dtype=steps.kv_dtype,
        attention="triton" if steps.deterministic else steps.attention,
        row_kernels="triton" if steps.deterministic else None,
    )
    mesh = mesh_of(device, steps.num_shards)
    place = Placement.like(NamedSharding(mesh, PartitionSpec()))
    with place.in_force():
        how = Quantisation.of(RuntimeOptions(quantize=steps.quantize))

    def made() -> nnx.Module:
        model = Decoder(config, rngs=None, layer_layout=steps.layout)
        if how is not None:
            replace_weights(model, how.change)
        return model

    model = nnx.eval_shape(made)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        params,
        state_shardings(params, mesh),
    )
    page_dtype = steps.kv_dtype or steps.dtype
    cache = jax.eval_shape(
        lambda: empty_cache(config, 4000, 32, page_dtype, steps.layout, steps.num_shards)
    )
    with place.in_force():
        programs = Programs(graphdef, engine, config, place)
    modules = {}
    # For large models the counts outside the layers are those of the usual head.
    is_large = steps.is_llama_3_8b or steps.mixture is not None
    variant = Variant.GREEDY if is_large else Variant.FULL
    for kind, compiled in zip(
        ("mixed step", "decode loop"), programs.compiled_steps(params, cache, variant), strict=True
    ):
        name = f"{kind}, {steps}"
        own_bytes = _num_bytes(cache) // steps.num_shards
        problems += _memory_problems(device, f"{name}, {num_layers} layers", compiled, own_bytes)
        text = modules[name] = compiled.as_text()
        problems += [
            f"{name}, {num_layers} layers: no kernel {kernel}"
            for kernel in (
                *("rotate_and_write", _SPLIT_KERNELS[steps.attention]),
                *(() if how is None else ("quantised_matmul",)),
                *(() if steps.mixture is None else ("grouped_matmul",)),
                *(("rowwise_product", "rms_norm") if steps.deterministic else ()),
            )
            if kernel not in text
        ]
        if config.experts is not None:
            is_loop = kind == "decode loop"
            needed = _needed_flops(
                config, steps.max_slots if is_loop else _MAX_STEP_TOKENS, is_loop
            )
            if (flops := product_flops(text)) > _MAX_FLOPS * needed:
                problems.append(f"{name}: {flops:.3g} operations of products, of {needed:.3g}")
        if steps.deterministic:
            problems += [
                f"{name}, {num_layers} layers: {each} adds up as the batch's size says"
                for each in sums_of_floats(text)
            ]
        # A mixed step has activations of the size of some weights, and scanned layers are slices.
        if how is not None and kind == "decode loop" and steps.layout == "unrolled":
            problems += [f"{name}: a weight is copied: {each}" for each in _copies(text, model)]
    return modules


def _needed_flops(config: DecoderConfig, tokens: int, has_head: bool) -> int:
    """Return the operations of the products that a step with experts needs, without attention."""
    mixture, embed = config.experts, config.hidden_size
    assert mixture is not None
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    experts = mixture.num + mixture.per_token * 3 * mixture.size
    weights = config.num_layers * embed * (heads * config.head_dim + experts)
    return 2 * tokens * (weights + has_head * embed * config.vocab_size)


def _copies(hlo: str, model: nnx.Module) -> list[str]:
    """Return instructions of the module that write the codes or the numbers of a whole weight."""
    codes, numbers = set(), set()
    for _, module in nnx.iter_modules(model):
        if isinstance(module, QuantisedWeight):
            size = module.codes.get_value().size
            codes.add(size)
            numbers.add(size * 8 // module.bits)
    return [*made_arrays(hlo, codes, "[us]8"), *made_arrays(hlo, numbers)]


def _compile_tasks(device: str, problems: list[str]) -> dict[str, float]:
    """Return the launches of a task of 64 LSTM steps, with what begins and ends a call."""
    mesh = mesh_of(device)
    step = Embedded(LSTM(1024, 1024, rngs=nnx.Rngs(0)), 1000, rngs=nnx.Rngs(0))
    layout = CellLayout(sequence_model(step, name="lstm").cells)
    programs = CellPrograms(layout, has_flat=False)
    place = NamedSharding(mesh, PartitionSpec())

    def like(*shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=place)

    (t,) = layout.types
    (own,) = programs.params
    params = tuple(like(*leaf.shape, dtype=leaf.dtype) for leaf in own)
    specs = [layout.pools[pool] for pool in programs.pools[t.index]]
    pools = tuple(like(4000, *spec.shape, dtype=spec.dtype) for spec in specs)
    with jax.set_mesh(mesh):
        task: Any = programs.calls[t.index]
        compiled = task.lower(params, pools, like(5, 64, layout.width), like()).compile()
    problems += _memory_problems(device, "a task of lstm", compiled, _num_bytes(pools))
    text = compiled.as_text()
    problems += [
        f"a task of lstm: no kernel {kernel}"
        for kernel in ("gated_cell", "copy_pages")
        if kernel not in text
    ]
    return {"lstm": launches(text)}


def _memory_problems(device: str, name: str, compiled: Any, donated_bytes: int) -> list[str]:
    sizes = compiled.memory_analysis()
    problems = []
    if sizes.alias_size_in_bytes < donated_bytes:
        problems.append(
            f"{name}: {sizes.alias_size_in_bytes} bytes are updated in place, of {donated_bytes}"
        )
    if sizes.temp_size_in_bytes > _MAX_TEMPORARY_BYTES * GPUS[device].num_cores:
        problems.append(f"{name}: {sizes.temp_size_in_bytes} bytes of temporaries")
    return problems


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _shared_bytes() -> dict[str, int]:
    """Return the maximum bytes of shared memory that a block of each of our kernels takes."""
    ours = set().union(*(configuration.kernels for configuration in CONFIGURATIONS))
    found = dict.fromkeys(sorted(ours), 0)
    for path in Path(_DUMP.name).glob("*thunk_sequence.txt"):
        for kernel, size in re.findall(
            r"(\w+) grid: .* shared_memory: (\d+) bytes", path.read_text()
        ):
            if kernel in found:
                found[kernel] = max(found[kernel], int(size))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel-gate", description=__doc__)
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--subset",
        action="store_true",
        help="compile only a part of attention's configurations and of the steps, as CI does",
    )
    one.add_argument("--write", action="store_true", help="record the present launches on an H100")
    parser.add_argument(
        "--device", choices=tuple(GPUS), default="h100", help="the GPU to compile for"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the configurations with this in their name"
    )
    parser.add_argument(
        "--no-steps", action="store_true", help="compile the kernels alone, and no whole steps"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
