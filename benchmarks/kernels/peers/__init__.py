"""Attention kernels of PyTorch and its neighbours, at the shapes of ours."""
