"""Speculative decoding: drafts of the next tokens, taken from earlier text, and the choice of how many to verify."""
