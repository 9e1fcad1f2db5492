"""Conversion of logits to tokens: logit shaping, filters, sampling, and grammar masks."""
