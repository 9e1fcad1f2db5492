"""The API of Ollama, for editors and other programs that look for it."""
