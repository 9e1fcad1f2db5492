"""The API of Anthropic: messages, and how many tokens they are."""
