"""The types that all other rooms share: requests, completions, settings, errors, clocks."""
