"""The inference engine. It takes token ids and returns token events.

It contains the scheduler, the KV cache, the models, attention, and sampling. `app` handles text, chat templates,
downloads, HTTP, and the terminal.
"""
