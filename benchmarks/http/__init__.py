"""The cost of HTTP."""
