"""The host loop: requests in, answers and text out, and records of its steps."""
