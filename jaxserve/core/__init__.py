"""Requests, completions, settings, errors, time: what every other room speaks about."""
