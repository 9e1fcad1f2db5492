"""The engine of a chat: the process that runs it, its state while it loads, and who uses it."""
