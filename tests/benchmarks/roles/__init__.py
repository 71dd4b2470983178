"""Tests of the benchmark of a fleet's roles."""
