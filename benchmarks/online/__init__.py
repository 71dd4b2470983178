"""Latency against the rate of arrivals."""
