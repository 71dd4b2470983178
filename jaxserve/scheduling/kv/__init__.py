"""The KV of sequences: page tables, reservations, and the tiers that hold it."""
