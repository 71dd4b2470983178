"""Tests of what adapters cost."""
