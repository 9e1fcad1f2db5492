"""Weights in few bits: file formats, canonical packed layouts, quantized linear layers and their kernels.

Knows tensors and bytes. Knows nothing of models, requests, text or the terminal.
"""
