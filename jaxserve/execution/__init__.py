"""Executors, which carry out plans, and the code that builds and sizes them."""
