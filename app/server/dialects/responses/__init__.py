"""OpenAI's Responses API: replies are lists of items, streamed as named events, and stored so that they can be
continued.
"""
