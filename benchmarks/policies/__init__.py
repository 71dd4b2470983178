"""Policies compared on one workload."""
