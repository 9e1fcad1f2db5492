"""Text and token ids: tokenizers of every kind, streaming detokenization, and text that is safe for a terminal."""
