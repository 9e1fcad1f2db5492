"""The HTTP endpoint: routes, wire formats and the checks at the door. Runs under any ASGI server."""
