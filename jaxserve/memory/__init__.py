"""Bookkeeping of KV memory, free of JAX: which pages are whose, and what has been promised."""
