"""The paged KV cache: block pools, prefix matching, and the tiers of GPU memory, RAM, and disk."""
