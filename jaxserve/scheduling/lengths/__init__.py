"""What is expected of every sequence's length: one object that owns it, and what is read off it."""
