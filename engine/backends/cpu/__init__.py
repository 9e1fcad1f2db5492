"""The CPU engine. A step is recorded once as a program, which a thread pool then runs in one call per batch."""
