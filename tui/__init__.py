"""The chat in the terminal, in Textual. Everything else it needs comes through the protocols of `client.py`."""
