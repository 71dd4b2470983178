"""The time of a decode step by its bytes, operations and launches; a model, not a measurement.

Kernels run one after another, so a step takes the sum of their times. A kernel takes the longer of
its bytes over the memory's rate and its operations over the arithmetic's, and each launch costs
some time in which the device is neither full nor empty. `make kernel-gate` counted the launches in
compiled steps. docs/performance_model.md says what is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from benchmarks.common.roofline import kv_token_bytes, layer_weights
from benchmarks.common.shapes import SHAPES, hf_config
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.families.llama import LlamaConfig

_GATE = Path(__file__).parents[2] / "scripts" / "kernel_gate.json"
# Steps of `kernel_gate.json`, by their largest batch.
_STEPS = MappingProxyType({64: "Llama 3 8B, unrolled", 256: "Llama 3 8B, unrolled, 256 slots"})
PAGES = MappingProxyType({None: "", "float8_e4m3fn": ", float8_e4m3fn pages"})
_WEIGHT_BYTES = 2
_LOGIT_BYTES = 4


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """The rates of a device that kernels reach.

    Attributes:
      launch_s: from the end of a kernel to the start of the next one in a CUDA graph, plus the loss
        of both by not filling the device meanwhile.
      host_s: from the end of an iteration to the start of the next one, where the host decides.
      memory_bytes: available to weights and pages.
    """

    bytes_per_s: float
    flops_per_s: float
    launch_s: float
    host_s: float
    memory_bytes: float


# Copy and product as they were reached on H100s (SXM, HBM3); the two times are assumptions.
H100 = Device(
    bytes_per_s=3.0e12, flops_per_s=800e12, launch_s=1.5e-6, host_s=20e-6, memory_bytes=78e9
)


@final
@dataclass(frozen=True, kw_only=True)
class Launches:
    """The counts of `make kernel-gate` in a decode loop."""

    a_layer: float
    beside: float
    host_decisions: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a decode step, by cause."""

    products_s: float
    keys_and_values_s: float
    head_s: float
    launches_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return sum(asdict(self).values())


def predict(
    model: str,
    device: Device,
    launches: Launches,
    *,
    batch: int,
    context: float,
    kv_dtype: str | None = None,
) -> StepTime:
    """Return the time of an iteration in which `batch` sequences decode.

    Args:
      model: one of `SHAPES`, with weights in bfloat16.
      context: mean tokens of a sequence.
      kv_dtype: of pages; None for bfloat16.
    """
    embed, mlp, layers, heads, kv_heads, vocab = SHAPES[model]
    head_dim = embed // heads

    def kernel_s(num_bytes: float, flops: float) -> float:
        return max(num_bytes / device.bytes_per_s, flops / device.flops_per_s)

    def product_s(inputs: int, outputs: int, other_bytes: float = 0.0) -> float:
        numbers = inputs * outputs
        return kernel_s(_WEIGHT_BYTES * numbers + other_bytes, 2.0 * batch * numbers)

    a_layer_s = (
        product_s(embed, (heads + 2 * kv_heads) * head_dim)
        + product_s(heads * head_dim, embed)
        + product_s(embed, 2 * mlp)
        + product_s(mlp, embed)
    )
    attention_s = kernel_s(
        batch * context * kv_token_bytes(kv_heads, head_dim, kv_dtype or "bfloat16"),
        4.0 * batch * context * heads * head_dim,
    )
    # Logits are written by the product, and read by the sampler.
    logits_bytes = 2.0 * batch * vocab * _LOGIT_BYTES
    return StepTime(
        products_s=layers * a_layer_s,
        keys_and_values_s=layers * attention_s,
        head_s=product_s(embed, vocab, logits_bytes),
        launches_s=(layers * launches.a_layer + launches.beside) * device.launch_s,
        host_s=launches.host_decisions * device.host_s,
    )


def fits(
    model: str, device: Device, *, batch: int, context: float, kv_dtype: str | None = None
) -> bool:
    """Return whether the weights, and the pages of all sequences, fit in the device's memory."""
    config = LlamaConfig.from_hf(hf_config(model))
    layers, vocab = config.num_layers, config.hidden_size * config.vocab_size
    weights = layers * layer_weights(config) + 2 * vocab
    token_bytes = kv_token_bytes(config.num_kv_heads, config.head_dim, kv_dtype or "bfloat16")
    held = batch * context * layers * token_bytes
    return _WEIGHT_BYTES * weights + held <= device.memory_bytes


def counted(batch: int, kv_dtype: str | None = None) -> Launches:
    """Return the gate's counts of the decode loop that serves a batch of Llama 3 8B."""
    known = json.loads(_GATE.read_text(encoding="utf-8"))
    largest = next((size for size in _STEPS if batch <= size), None)
    if largest is None:
        raise InvalidConfigError(f"a batch of {batch} was not compiled; give up to {max(_STEPS)}")
    pages = PAGES.get(kv_dtype, "") if largest == min(_STEPS) else ""
    name = f"decode loop, {_STEPS[largest]}{pages}"
    return Launches(
        a_layer=known["launches a layer"][name],
        beside=known["launches beside the layers"][name],
        host_decisions=known["host decisions of a loop"][name],
    )
