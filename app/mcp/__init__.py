"""Tools from MCP servers, for the chat."""
