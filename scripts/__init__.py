"""Programs for a checkout. Run them from its root."""
