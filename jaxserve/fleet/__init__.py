"""Replicas in processes of their own, on Ray, behind one `generate`."""

from jaxserve.fleet.dispatcher import ReplicaState
from jaxserve.fleet.fleet import Fleet

__all__ = ["Fleet", "ReplicaState"]
