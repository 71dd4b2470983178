"""Result files into tables and figures: `python -m benchmarks.figures --help`."""
