"""Who advances in the next step: one strategy a file."""
