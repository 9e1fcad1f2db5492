"""The CPU engine: a step is recorded once as a program, and a thread pool runs it in one call."""
