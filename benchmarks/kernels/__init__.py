"""Kernels against the limits of the device, and against other libraries' kernels."""
