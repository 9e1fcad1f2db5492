"""Weights on a GPU: how they lie in its memory, and linear layers over them."""
