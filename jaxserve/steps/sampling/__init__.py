"""Choosing the next token, on the device."""
