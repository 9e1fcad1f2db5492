"""uvicorn, with this program's handling of signals, and of work for which requests wait at shutdown."""

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from app.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from app.process.signals import ending_signals
from app.server.http.connection import Connection
from engine.errors import EngineError

log = logging.getLogger(__name__)

# seconds for the current step, and for clients to read their last event; then connections are aborted
STOP_SECONDS = 1.8
# seconds between two checks whether the engine has failed, and from then until the server stops: health checks see it
FAILURE_SECONDS = 1.0
IDLE_POLL_SECONDS = 1.0  # longest time between two checks whether the server is idle
_ACCEPTING_SECONDS = 0.1  # seconds until all accepted connections are registered
_DRAIN_SECONDS = 0.05
_MAX_HEADER_BYTES = 64 << 10
# time limits of clients that connect by TLS: for their part of the handshake, and for that of the end
_HANDSHAKE_SECONDS = 10.0
_TLS_END_SECONDS = 5.0


def server_config(application: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's settings. Requests with a longer head than the limit are refused."""
    from app.server.dialects.openai.errors import ERRORS as OPENAI_ERRORS

    class OpenAIConnection(Connection):
        ERRORS = OPENAI_ERRORS

    return uvicorn.Config(
        application,
        http=OpenAIConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
    )


class Computing(Protocol):
    """Work for which requests wait. `stop` ends it and notifies every request. `stop` may be called several times."""

    @property
    def failure(self) -> str:
        """The error after which no request can be served until the process starts again; empty if there is none."""
        ...

    async def stop(self) -> object: ...


@dataclass(frozen=True, slots=True)
class IdleExit:
    """The rule by which an idle server ends: `seconds` after its last request, unless it is busy without one."""

    seconds: float
    is_busy: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class TLSListener:
    """Listening sockets of a server whose connections use TLS."""

    sockets: list[socket.socket]
    context: ssl.SSLContext


class HTTPServer(uvicorn.Server):
    """uvicorn that also stops the work for which requests wait, and handles signals itself.

    `on_ready` is called when the server accepts connections. `exit_now` must end the process with the given status; it
    is called if shutting down takes too long, or at a second Ctrl-C.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        work: Computing,
        on_ready: Callable[[], None],
        exit_now: Callable[[int], None],
        idle: IdleExit | None = None,
        tls: TLSListener | None = None,
    ) -> None:
        super().__init__(config)
        self._work = work
        self._idle = idle
        self._announce = on_ready
        self._exit_now = exit_now
        self._tls = tls

    async def serve_until_failure(self, sockets: list[socket.socket]) -> None:
        """Serve until the server is stopped. Raises EngineError if the engine fails for good.

        A supervisor of the process can then start it again, which is the only way to recover a GPU.
        """
        watching = [asyncio.create_task(self._stop_on_failure())]
        if self._idle is not None:
            watching.append(asyncio.create_task(self._stop_when_idle(self._idle)))
        await self.serve(sockets)
        for task in watching:
            task.cancel()
        if problem := self._work.failure:
            raise EngineError(f"The engine has failed: {problem}", "Start it again.")

    def stop(self) -> None:
        """Refuse new connections, and end the running replies."""
        self.should_exit = True

    async def _stop_on_failure(self) -> None:
        while not self._work.failure:
            await asyncio.sleep(FAILURE_SECONDS)
        await asyncio.sleep(FAILURE_SECONDS)
        self.should_exit = True

    async def _stop_when_idle(self, idle: IdleExit) -> None:
        """Stop after the idle time. Connections that arrive meanwhile are served, or wait for the next server.

        Polls, because the end of most work is not reported here.
        """
        requests, used_at = -1, time.monotonic()
        while time.monotonic() - used_at < idle.seconds:
            await asyncio.sleep(min(IDLE_POLL_SECONDS, idle.seconds / 4))
            state = self.server_state
            if state.tasks or state.total_requests != requests or idle.is_busy():
                requests, used_at = state.total_requests, time.monotonic()
        log.info("no request has arrived for %.0f s", idle.seconds)
        for server in self.servers:
            server.close()
        await asyncio.sleep(_ACCEPTING_SECONDS)
        await self._drain()
        self.should_exit = True

    async def _drain(self) -> None:
        """Serve the accepted connections. A connection without a request is closed by its own time limit."""
        while self.server_state.connections:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.is_responding():
                    connection.shutdown()  # closes it after the reply
            await asyncio.sleep(_DRAIN_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would raise the signal again after a clean end, so that the exit status is a failure."""
        yield

    def stop_on_signals(self) -> None:
        """Stop the server on SIGINT, SIGTERM, and SIGHUP. The handlers stay until the process ends."""
        for number in (signal.SIGINT, *ending_signals()):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the server, or exit at once at a second Ctrl-C. Other signals may arrive twice, from two programs."""
        if self.should_exit and number == signal.SIGINT:
            self._exit_now(EXIT_INTERRUPTED)
        self.should_exit = True  # uvicorn checks it every 0.1 s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._tls is not None:
            self.servers += [await self._serve_tls(one, self._tls.context) for one in self._tls.sockets]
        self._announce()

    async def _serve_tls(self, listener: socket.socket, context: ssl.SSLContext) -> asyncio.Server:
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        connect = partial(protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return await asyncio.get_running_loop().create_server(
            connect,
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=_TLS_END_SECONDS,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        status = EXIT_FAILURE if self._work.failure else EXIT_OK
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._exit_now, status)
        ending = asyncio.create_task(self._work.stop())  # starts when the listening sockets are closed
        await super().shutdown(sockets)  # waits until every running reply has been sent
        await ending
