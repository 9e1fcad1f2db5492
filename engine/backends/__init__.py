"""Backends that compute a step: the reference in torch, the CPU engine, and the GPU engine."""
