"""What computes a step: the plain reference, the CPU engine, and the GPU engine."""
