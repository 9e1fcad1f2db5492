"""Scheduling: decides which requests run in a step, with how many tokens, and which are preempted. Uses no tensors."""
