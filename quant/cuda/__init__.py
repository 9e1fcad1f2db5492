"""Quantized weights on a GPU: their layout in GPU memory, and linear layers over them."""
