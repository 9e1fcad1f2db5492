"""Grammars of replies: validation, compilation, and token masks, in separate processes."""
