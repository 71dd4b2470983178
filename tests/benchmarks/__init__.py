"""Tests of the benchmarks: what they compute and write, never how fast anything is."""
