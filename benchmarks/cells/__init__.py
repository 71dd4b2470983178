"""Cellular batching and graph batching: latency against throughput."""
