"""What HTTP costs."""
