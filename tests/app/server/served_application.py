"""Serve an ASGI application on a free port, with an event loop in a separate thread."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn
from starlette.types import ASGIApp

from app.server.http_server import server_config
from tests.support.processes import HANGING_SECONDS, until

T = TypeVar("T")


class ServedApplication:
    """Serves the application inside its `with` block."""

    def __init__(self, application: ASGIApp) -> None:
        self.application = application
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = server_config(application)
        config.timeout_graceful_shutdown = 10
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="server", daemon=True)

    def use_tls(self, certificate: Path, key: Path) -> Self:
        """Serve HTTPS. Call it before the `with` block."""
        self._server.config.ssl_certfile, self._server.config.ssl_keyfile = str(certificate), str(key)
        self.url = f"https://127.0.0.1:{self.port}"
        return self

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve([self._socket])

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the server's event loop and return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANGING_SECONDS)

    def tasks(self) -> int:
        """Return the number of tasks of the server's event loop."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.call(count())

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server. Stopping it twice is harmless."""
        self._server.should_exit = True
        self._thread.join(HANGING_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"
        self._socket.close()
