"""A service of several replicas, each in its own process, on Ray."""

from jaxserve.fleet.fleet import Fleet
from jaxserve.fleet.replica import ReplicaState

__all__ = ["Fleet", "ReplicaState"]
