"""Carries out plans: executors, and how they are built and sized."""
