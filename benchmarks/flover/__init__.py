"""Section VI of the Flover paper, on this machine."""
