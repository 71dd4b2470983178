"""Measurements. Each prints one JSON object a run, with the matching bound from the same run."""
