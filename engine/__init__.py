"""Token ids in, token events out: scheduling, KV memory, models, attention, sampling.

Knows nothing of text, chat templates, files to download, HTTP or the terminal.
"""
