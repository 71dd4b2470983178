"""The KV of sequences: page tables, reservations, and what lies on which tier."""
