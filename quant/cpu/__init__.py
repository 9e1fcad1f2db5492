"""Quantized weights on the CPU: packed tiles, and vector code that needs no compiler on the user's machine."""
