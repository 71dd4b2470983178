"""The facade `Runtime`, the `Service` that it is, and the types it returns."""

from jaxserve.engine.pending import Pending
from jaxserve.runtime.runtime import Runtime
from jaxserve.runtime.scoring import whole_processed_logprobs
from jaxserve.runtime.service import Service
from jaxserve.runtime.stats import RuntimeStats

__all__ = ["Pending", "Runtime", "RuntimeStats", "Service", "whole_processed_logprobs"]
