"""Throughput of requests that arrive all at once, the bound of the machine, and other engines."""
