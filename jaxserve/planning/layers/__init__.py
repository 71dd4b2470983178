"""The profiler of layers (ExeGPT, section 3): what the parts of one layer cost on real devices.

`measure_layers` times attention separately from the rest of a layer for every tensor-parallel
degree, and the costs of synchronisation, transfers between stages, and KV handovers. From the
`LayerProfile`, `MeasuredLayerCost` implements `LayerCost`, so that `schedules.search` covers RRA
and WAA with stages and partial tensor parallelism.
"""

from jaxserve.planning.layers.bench import LayerBench
from jaxserve.planning.layers.cost import free_bytes_of, layers_deployment
from jaxserve.planning.layers.measure import measure_layers
from jaxserve.planning.layers.profile import LayerOrigin, LayerProfile, LayerSizes

__all__ = [
    "LayerBench",
    "LayerOrigin",
    "LayerProfile",
    "LayerSizes",
    "free_bytes_of",
    "layers_deployment",
    "measure_layers",
]
