"""Which sequence goes when memory runs out, and what becomes of its KV: one strategy a file."""
