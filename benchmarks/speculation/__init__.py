"""What speculation gains."""
