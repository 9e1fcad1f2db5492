"""The API of OpenAI, with the common extensions of other engines."""
