"""How much memory to reserve: one strategy a file."""
