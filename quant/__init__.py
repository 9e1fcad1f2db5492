"""Quantized weights: file formats, the canonical form, quantization, and linear layers with their kernels."""
