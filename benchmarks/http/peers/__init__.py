"""Other servers on the same requests: scripts that run in environments of their own."""
