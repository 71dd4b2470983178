"""What grammars cost."""
