"""The facade: `Runtime`, and what it hands out."""

from jaxserve.runtime.pending import Pending
from jaxserve.runtime.runtime import Runtime
from jaxserve.runtime.stats import RuntimeStats

__all__ = ["Pending", "Runtime", "RuntimeStats"]
