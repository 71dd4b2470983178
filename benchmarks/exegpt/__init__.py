"""Figures 6 and 8 and table 6 of the ExeGPT paper, estimated."""
