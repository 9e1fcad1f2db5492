"""The terminal chat. It will know a small client port and Textual, and imports nothing else of ours."""
