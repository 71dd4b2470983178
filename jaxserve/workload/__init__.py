"""Workloads for measurements: data sets, tasks, recorded traces, synthetic prompts."""

from jaxserve.workload.item import WorkloadItem
from jaxserve.workload.synthetic import random_items

__all__ = ["WorkloadItem", "random_items"]
