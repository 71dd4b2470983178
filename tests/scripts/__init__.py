"""Tests of the scripts: of their computations, not of the programs that they run."""
