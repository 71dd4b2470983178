"""Programs for a checkout: run them from its root."""
