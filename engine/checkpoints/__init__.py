"""Checkpoint formats: the metadata and tensors of GGUF files and safetensors folders."""
