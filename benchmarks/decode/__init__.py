"""Decode steps of one model against the memory roofline."""
