"""Which sequence goes first: one strategy a file."""
