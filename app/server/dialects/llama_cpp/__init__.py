"""The API of llama.cpp's own server, for editors that complete code."""
