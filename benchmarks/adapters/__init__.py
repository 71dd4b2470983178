"""What requests with adapters cost."""
