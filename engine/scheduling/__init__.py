"""Scheduling: which requests run in a step, with how many tokens, and which are preempted. Plain Python, no tensors."""
