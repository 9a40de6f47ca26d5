"""Hand-written GPU kernels (Triton). Nothing here is imported until a model runs on a GPU."""
