"""Conversations whose turns come back, and ways of restoring their pages."""
