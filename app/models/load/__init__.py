"""Load a model file into an engine and a tokenizer."""
