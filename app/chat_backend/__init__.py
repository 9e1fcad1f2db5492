"""The chat in the terminal, but for its screens: what `tui/client.py` asks for, the engine process, and the guard."""
