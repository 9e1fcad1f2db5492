"""Checkpoint formats: GGUF files and safetensors folders, read as metadata and tensors."""
