"""Cellular batching beside graph batching: latency against throughput."""
