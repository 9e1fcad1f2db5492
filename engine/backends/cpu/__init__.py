"""The CPU engine: a step recorded as a program once, and run by a team of threads in one call."""
