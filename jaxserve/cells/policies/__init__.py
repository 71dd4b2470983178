"""Policies that BatchMaker is compared with, on the same cells. They need no JAX.

| policy | the system that it represents |
|---|---|
| `Padding` | TensorFlow, MXNet and PyTorch: padding to a common length, in buckets |
| `GraphMerging` | DyNet's on-the-fly batching, and TensorFlow Fold's dynamic batching |
| `IdenticalGraphs` | a graph that is fixed for one structure: the ideal of figure 2.15 |
| `OneAtATime` | no batching |
| `LazyBatching` | LazyBatching: node by node under a latency target, with a stack of batches |

They model a system's choices without its costs: host time for building, merging or launching graphs
does not count, except that of the run itself.
"""

from jaxserve.cells.policies.graph_batches import IdenticalGraphs, OneAtATime
from jaxserve.cells.policies.graph_merging import GraphMerging
from jaxserve.cells.policies.lazy_batching import LazyBatching
from jaxserve.cells.policies.padding import Padding

__all__ = ["GraphMerging", "IdenticalGraphs", "LazyBatching", "OneAtATime", "Padding"]
