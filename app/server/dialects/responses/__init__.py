"""OpenAI's Responses API: replies made of items, told by named events, and kept to go on from."""
