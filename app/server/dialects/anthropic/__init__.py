"""The API of Anthropic: messages and token counts."""
