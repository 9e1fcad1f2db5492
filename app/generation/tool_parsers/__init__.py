"""Parsers of replies: reasoning, tool calls, and the formats in which models write them."""
