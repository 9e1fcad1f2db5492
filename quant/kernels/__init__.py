"""Kernels over canonical weights, one module a device kind, beside the reference that explains and checks them."""
