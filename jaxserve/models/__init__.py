"""Flax model families, their weights and their tokenizers."""
