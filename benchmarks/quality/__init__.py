"""What weights in few bits cost in quality."""
