"""The chat in the terminal. It knows a small client port and Textual, and imports nothing else of ours."""
