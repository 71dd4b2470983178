"""Tables and figures of the result files."""
