"""How well the lengths of answers are predicted."""
