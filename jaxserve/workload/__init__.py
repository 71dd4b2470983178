"""Workloads for measurements: data sets, tasks, recorded traces, synthetic prompts."""

from jaxserve.workload.items import WorkloadItem, random_items

__all__ = ["WorkloadItem", "random_items"]
