"""Triton kernels of the engine and their reference implementations in torch: functions over tensors."""
