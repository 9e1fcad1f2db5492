"""Grammars for replies: checked, compiled, and followed in processes of their own."""
