"""Hugging Face folders whose weights are in eight or four bits.

GPTQ, AWQ, compressed-tensors and fp8.
"""
