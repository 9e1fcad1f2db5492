"""A client of a running server."""
