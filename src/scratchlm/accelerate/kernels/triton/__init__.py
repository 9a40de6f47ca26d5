"""Kernels in Triton, for any recent GPU."""
