"""Replicas of a fleet that compute prompts or answers, beside replicas that compute both."""
