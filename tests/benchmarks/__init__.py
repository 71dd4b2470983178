"""Tests of the benchmarks: what they compute and write, but not how fast anything is."""
