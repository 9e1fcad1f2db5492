"""The engine's kernels: plain functions over tensors, one module a device kind, beside the reference twin."""
