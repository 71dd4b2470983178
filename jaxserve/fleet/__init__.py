"""A service of several replicas, each in a process of its own, on Ray."""

from jaxserve.fleet.fleet import Fleet
from jaxserve.fleet.replica import ReplicaState

__all__ = ["Fleet", "ReplicaState"]
