"""Jitted functions of parameters, page cache and slots."""
