"""Folders with weights in eight or four bits: GPTQ, AWQ, compressed-tensors and fp8."""
