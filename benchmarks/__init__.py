"""Measurements. Each run prints one JSON object, with the matching bound from the same run."""
