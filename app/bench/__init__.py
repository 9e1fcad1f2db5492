"""Measuring: how fast this program and others generate tokens, one after the other on the same machine."""
