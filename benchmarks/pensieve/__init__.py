"""Section 3.6 of the Pensieve thesis, simulated."""
