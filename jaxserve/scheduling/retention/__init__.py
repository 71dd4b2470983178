"""What becomes of the pages after the answer: one strategy a file."""
