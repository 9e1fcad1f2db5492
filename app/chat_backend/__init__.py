"""The backend of the terminal chat: implements the protocols of `tui/client.py`, and runs the engine process."""
