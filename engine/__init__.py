"""Token ids in, token events out: scheduling, the KV cache, models, attention, and sampling.

Text, chat templates, downloads, HTTP, and the terminal are left to `app`.
"""
