"""Kernels against the limits of the device, and beside other libraries' kernels."""
