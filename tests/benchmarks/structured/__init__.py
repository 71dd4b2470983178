"""Tests of what grammars cost."""
