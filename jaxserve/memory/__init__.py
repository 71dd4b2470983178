"""Bookkeeping of KV memory, free of JAX: pages, their owners and reservations."""
