"""Time from an empty process to the first token, and memory for loading a checkpoint."""
