"""Tests of the scripts: what they work out, not what they run."""
