"""Quantized weights on the CPU: packed tiles, and kernels that need no compiler on the user's machine."""
