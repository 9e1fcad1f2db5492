"""Server fixtures for the checks of clients."""

from tests.app.server.conftest import hash_server, scripted_server

__all__ = ["hash_server", "scripted_server"]
