"""Who goes first: one strategy a file."""
