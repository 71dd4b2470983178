"""Which sequences advance in the next step: one strategy a file."""
