"""The HTTP server: routes, wire formats, and access checks."""
