"""PyTorch's attention at the shapes that ours is timed at: `python -m benchmarks.kernel_peers`."""
