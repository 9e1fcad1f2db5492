"""The API of Ollama, for the editors and programs that look for it on their own."""
