"""The types that all packages share: requests, completions, settings, errors, clocks."""
