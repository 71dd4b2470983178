"""Tests of the bits of requests in random batches."""
