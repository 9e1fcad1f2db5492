"""The engine of a chat: its process, its state while it loads, and the connection to it."""
