"""The engine of a chat: its process, its loading state, and the connection to it."""
