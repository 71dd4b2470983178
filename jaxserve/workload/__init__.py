"""What is asked of the runtime in measurements: data sets and synthetic prompts."""

from jaxserve.workload.item import WorkloadItem
from jaxserve.workload.synthetic import random_items

__all__ = ["WorkloadItem", "random_items"]
