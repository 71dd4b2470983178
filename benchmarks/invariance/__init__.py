"""The bits of a request in random batches."""
