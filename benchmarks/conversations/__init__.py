"""Conversations with returning turns, and ways of restoring their pages."""
