"""A model file becomes an engine and a tokenizer."""
