"""Other servers on the same requests: scripts that run in their own environments."""
