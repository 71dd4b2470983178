"""Compile the GPU kernels, and steps with them, for a GPU that is not there: `make kernel-gate`.

Runs in an environment of its own, with JAX's CUDA plug-in. Every configuration of the kernels
becomes machine code for an H100; a register spill is an error. A decode and a mixed step are
compiled whole: the cache and the slots must be updated in place, temporaries bounded, and the
launches of a layer no more than those written down beside this script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

_DUMP = tempfile.TemporaryDirectory(prefix="jaxserve-gate-")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_gpu_fail_ptx_compilation_on_register_spilling=true",
        f"--xla_dump_to={_DUMP.name}",
        "--xla_dump_hlo_as_text",
    )
)

import jax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from tqdm import tqdm  # noqa: E402

from jaxserve.core.config import EngineConfig  # noqa: E402
from jaxserve.engine.placement import Placement  # noqa: E402
from jaxserve.engine.programs import Programs  # noqa: E402
from jaxserve.models.batch import empty_cache  # noqa: E402
from jaxserve.models.families.llama import Llama, LlamaConfig  # noqa: E402
from pallas_kernels.paged_attention.configurations import CONFIGURATIONS  # noqa: E402

LAUNCHES = Path(__file__).with_name("kernel_launches.json")
# What XLA has to know of the device that it compiles for; NVIDIA's figures.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
  clock_rate_ghz: 1.98
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main() -> int:
    """Check everything; the exit code."""
    options = _parser().parse_args()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=_H100, topology="1x1x1"
    )
    mesh = Mesh(topology.devices, ("tensor",))
    problems = _compile_configurations(mesh)
    launches = {
        f"{kind}, {layout}": count
        for layout in ("unrolled", "scanned")
        for kind, count in _compile_steps(mesh, layout, problems).items()
    }
    print(json.dumps({"launches a layer": launches}, indent=2))
    if options.write:
        LAUNCHES.write_text(json.dumps(launches, indent=2) + "\n")
    if not LAUNCHES.is_file():
        print("no launches are written down to compare with; see --write", file=sys.stderr)
        known = launches
    else:
        known = json.loads(LAUNCHES.read_text())
    problems += [
        f"{name}: {count} launches a layer, {known.get(name)} before"
        for name, count in launches.items()
        if count > known.get(name, 0)
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _compile_configurations(mesh: Mesh) -> list[str]:
    problems = []
    place = NamedSharding(mesh, PartitionSpec())
    for configuration in tqdm(CONFIGURATIONS, desc="compiling kernels", delay=2):
        function, arguments = configuration.call()
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
        )
        with jax.set_mesh(mesh):
            try:
                jax.jit(function).lower(**arguments).compile()
            except Exception as error:
                problems.append(f"{configuration}: {str(error).splitlines()[0]}")
    return problems


def _compile_steps(mesh: Mesh, layout: Any, problems: list[str]) -> dict[str, float]:
    """Launches a layer of the mixed step and the decode loop of a small Llama."""
    counts: dict[int, dict[str, int]] = {}
    for num_layers in (2, 4):
        for kind, compiled in _steps(mesh, layout, num_layers).items():
            problems += _memory_problems(f"{kind}, {layout}, {num_layers} layers", compiled)
            counts.setdefault(num_layers, {})[kind] = _num_launches(compiled)
    return {kind: (counts[4][kind] - counts[2][kind]) / 2 for kind in counts[2]}


def _steps(mesh: Mesh, layout: Any, num_layers: int) -> dict[str, Any]:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
    )
    engine = EngineConfig(num_pages=4000, max_slots=64, max_context=4096, max_step_tokens=512)
    place = Placement.like(NamedSharding(mesh, PartitionSpec()))
    model = nnx.eval_shape(lambda: Llama(config, rngs=None, dtype="bfloat16", layer_layout=layout))
    graphdef, params = nnx.split(model)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.whole), params
    )
    cache = jax.eval_shape(lambda: empty_cache(config, 4000, 32, "bfloat16", layout))
    programs = Programs(graphdef, engine, config, place)
    mixed, decode = programs.compiled_steps(params, cache)
    return {"mixed step": mixed, "decode loop": decode}


def _memory_problems(name: str, compiled: Any) -> list[str]:
    sizes = compiled.memory_analysis()
    cache_bytes = 2 * 4000 * 2 * 32 * 128 * 2
    problems = []
    if sizes.alias_size_in_bytes < 2 * cache_bytes:
        problems.append(f"{name}: only {sizes.alias_size_in_bytes} bytes are updated in place")
    if sizes.temp_size_in_bytes > cache_bytes:
        problems.append(f"{name}: {sizes.temp_size_in_bytes} bytes of temporaries")
    return problems


def _num_launches(compiled: Any) -> int:
    """Kernels, library calls and copies in the compiled module, loops' bodies counted once."""
    text = compiled.as_text()
    return len(re.findall(r" = \S+ (?:fusion|custom-call|copy|scatter|sort)\(", text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel-gate", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write down the launches of today")
    return parser


if __name__ == "__main__":
    sys.exit(main())
