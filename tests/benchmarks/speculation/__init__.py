"""Tests of what speculation gains."""
