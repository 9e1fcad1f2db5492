"""Runs the engine and the HTTP server in this process, and decides the order of startup and shutdown.

The port is opened before anything is downloaded, so that a port in use is reported at once. Requests are accepted while
the default model loads, and wait for it. At shutdown, the server first refuses new connections. Then every stream gets
a last event and the engines end. Then the connections close.
"""

import asyncio
import gc
import logging
import os
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from app.errors import EXIT_INTERRUPTED, InvalidSetting
from app.models.pulls import Pulls
from app.models.stored_model import StoredModel
from app.process.engine_lease import EngineLeases
from app.process.instance import Instance, recorded, running_instances, withdraw
from app.process.listening import EVERY_ADDRESS, ListeningSockets, PortTaken, base_url, is_loopback
from app.process.server_log import LogFile, logged_to
from app.process.service_manager import ServiceManager
from app.progress import Progress
from app.server.hosted_models import hosted_models
from app.server.http_server import HTTPServer, IdleExit, TLSListener, server_config
from app.service.manager import service_has
from app.settings.api_keys import chosen_keys, make_own_key, own_key_file, shared_key
from app.settings.settings import Settings
from engine.errors import EngineError
from engine.freed_memory import share_pools
from quant.errors import InglenookError

if TYPE_CHECKING:
    from app.server.application import AccessPolicy, ServerContext
    from app.server.served_models import ServedModels

log = logging.getLogger(__name__)

# Seconds after which a thread that runs Python code gives up the interpreter lock. This is longer than the Python part
# of a step, which should not be interrupted, and shorter than a whole step, so that the event loop is not blocked.
SWITCH_SECONDS = 0.0005
IDLE_SECONDS = 1800.0  # idle time after which a server ends that a service manager starts again for the next request


def run_host(settings: Settings, progress: Progress, leases: EngineLeases | None = None) -> None:
    """Download and load the default model, then serve all models until SIGINT, SIGTERM, or SIGHUP, or until the
    `leases` expire.

    Uses the sockets of a service manager if there are any, and reports to it when the default model is loaded.

    Raises PortTaken, InvalidSetting, the errors of `pull` and `load_model`, and KeyboardInterrupt if the server is
    stopped before the default model is loaded. A second Ctrl-C ends the process.
    """
    share_pools()
    settings = settings if leases is None else replace(settings, tls_port=0)  # only `ingle serve` serves other machines
    file = LogFile(settings.state_dir, settings.port)
    with logged_to(file):
        try:
            _run(settings, progress, leases, file)
        except InglenookError as problem:
            log.error("%s", problem.message)
            raise


def _run(settings: Settings, progress: Progress, leases: EngineLeases | None, file: LogFile) -> None:
    policy = access_policy(settings)
    manager = ServiceManager.take()
    with (
        closing(_listen(settings, manager.sockets)) as sockets,
        _listen_by_tls(settings) as tls,
        hosted_models(settings, policy, progress) as hosted,
    ):
        instance = _instance(hosted.default, settings.host, sockets.port)
        instance = replace(instance, kind="server" if leases is None else "chat")
        file.port = sockets.port
        host = _Host(hosted.models, hosted.pulls, instance, settings, progress, leases, manager, file)
        asyncio.run(host.serve(sockets, hosted.context, tls))
        if not host.is_ready:
            raise KeyboardInterrupt


def access_policy(settings: Settings) -> "AccessPolicy":
    """Return the rules by which requests are accepted.

    Raises InvalidSetting if other machines could connect without a key, or if a key cannot be read.
    """
    from app.server.application import AccessPolicy
    from app.server.http.access import Authenticator

    _check_reach(settings.host, settings)
    if settings.tls_port and not chosen_keys(settings) and shared_key(settings) is None:
        raise InvalidSetting("--tls accepts other machines, and no API key is set", "ingle share")
    names = (settings.host, *settings.host_names)
    authenticator = Authenticator(chosen_keys(settings), make_own_key(settings), partial(shared_key, settings))
    return AccessPolicy(authenticator, names, settings.allowed_origins, settings.max_requests)


def _check_reach(host: str, settings: Settings) -> None:
    """Raise InvalidSetting if other machines reach the server at `host`, and no API key is set."""
    if not is_loopback(host) and not chosen_keys(settings):
        raise InvalidSetting(
            f"--host {host} accepts other machines, and no API key is set",
            "Set a key with INGLE_API_KEY or --api-key-file, or leave --host out.",
        )


def _listen(settings: Settings, adopted: Sequence[socket.socket] = ()) -> ListeningSockets:
    """Listen on the server's port, and also on Ollama's port if the settings ask for it.

    Sockets that a service manager has opened are used instead.
    """
    if adopted:
        sockets = ListeningSockets(settings.port, settings.host, adopted=adopted)
        for address in sockets.addresses:
            _check_reach(address, settings)
        return sockets
    with ExitStack() as opened:
        sockets = opened.enter_context(closing(_listen_on_port(settings)))
        if settings.ollama_port:
            sockets.add(ListeningSockets(settings.ollama_port, settings.host, option="--ollama-port"))
        opened.pop_all()
    return sockets


@contextmanager
def _listen_by_tls(settings: Settings) -> Iterator[TLSListener | None]:
    """Listen on the port for HTTPS if the settings ask for it: on the given address, by default on all of them.

    Raises PortTaken, and InvalidSetting if the certificate cannot be read.
    """
    if not settings.tls_port:
        yield None
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as problem:
        raise InvalidSetting(f"{settings.tls_certificate}: {problem.strerror or problem}", "ingle share") from None
    host = EVERY_ADDRESS if settings.origins["host"] == "default" else settings.host
    with closing(ListeningSockets(settings.tls_port, host, option="--tls")) as sockets:
        yield TLSListener(sockets.sockets, context)


def _listen_on_port(settings: Settings) -> ListeningSockets:
    try:
        return ListeningSockets(settings.port, settings.host)
    except PortTaken as problem:
        for other in running_instances(settings):
            if other.port == settings.port:
                raise PortTaken(
                    f"port {other.port} is in use by ingle itself, which serves {other.title} (pid {other.pid})",
                    f"Use that server, stop it with ingle stop {other.port}, or choose another port with --port.",
                ) from None
        if service_has(settings.port, settings):
            raise PortTaken(
                f"port {settings.port} belongs to the service of ingle",
                "Use it: a request starts its server. Or choose another port with --port, or run ingle service remove.",
            ) from None
        raise problem


def _instance(stored: StoredModel, host: str, port: int) -> Instance:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = str(stored.path.absolute())
    return Instance(os.getpid(), port, base_url(host, port), stored.name, path, now, serves_all=True)


@dataclass
class _Host:
    """The server of this process, from the load of its default model to its end."""

    models: "ServedModels"
    pulls: Pulls
    instance: Instance
    settings: Settings
    progress: Progress
    leases: EngineLeases | None
    manager: ServiceManager
    file: LogFile
    is_ready: bool = False  # whether the default model has been loaded

    async def serve(self, sockets: ListeningSockets, context: "ServerContext", tls: TLSListener | None) -> None:
        """Serve while the default model loads, and afterwards.

        Raises the error of that load, and EngineError if an engine fails for good.
        """
        from app.generation.request_log import write_request_log
        from app.server.application import create_application

        application = create_application(self.models, context)
        served = application if self.leases is None else self.leases.track_requests(application)
        with ExitStack() as records, write_request_log(self.progress.say, self.file):
            starting: list[asyncio.Task[None]] = []
            server = HTTPServer(
                server_config(served),
                self,
                lambda: starting.append(self._begin(server, records)),
                self._exit_now,
                self._idle_exit(),
                tls,
            )
            server.stop_on_signals()
            await server.serve_until_failure(sockets.sockets)
            for task in starting:
                await task

    def _idle_exit(self) -> IdleExit | None:
        """Return the rule by which the server ends when it is idle; None: it does not."""
        seconds = self.settings.idle_exit
        if seconds is None:
            # a request of another machine cannot start the server again
            seconds = IDLE_SECONDS if self.manager.sockets and not self.settings.tls_port else 0.0
        return IdleExit(seconds, self._is_busy) if seconds else None

    def _is_busy(self) -> bool:
        return bool(self.pulls.now()) or any(model.needs_server for model in self.models.residents)

    def _begin(self, server: HTTPServer, records: ExitStack) -> "asyncio.Task[None]":
        """Start to load the default model, and stop the server if that fails."""
        task = asyncio.create_task(self._load_default(records))
        task.add_done_callback(lambda _: server.stop() if not self.is_ready else None)
        return task

    async def _load_default(self, records: ExitStack) -> None:
        residents, default = self.models.residents, self.models.names.default
        try:
            await residents.load(default.key)
        except EngineError:
            if residents.of(default.key).problem is None:  # the server was stopped meanwhile
                return
            raise
        model = await self.models.describe(None)
        is_chat = model.kind == "chat"
        self.instance = replace(self.instance, context_length=model.context_length if is_chat else None)
        records.enter_context(recorded(self.instance, self.settings))
        self.is_ready = True
        tune_interpreter()
        self.manager.notify("READY=1")
        log.info("%s is ready at %s", default.names[0], self.instance.api_url)
        _announce(default.names[0], self.instance, self.settings, self.progress)
        for name in (name for name, of_model in self.settings.models.items() if of_model.pin):
            with suppress(InglenookError):  # the log has the reason
                await self.models.load(name)

    @property
    def failure(self) -> str:
        return self.models.residents.failure

    async def stop(self) -> None:
        self.manager.notify("STOPPING=1")
        log.info("the server ends")
        await asyncio.gather(self.models.residents.close(), self.pulls.close())

    def _exit_now(self, status: int) -> None:
        """End the process at once. Child processes exit by themselves when their pipes close."""
        if self.is_ready:
            withdraw(self.instance, self.settings)
        os._exit(status if self.is_ready else EXIT_INTERRUPTED)


def tune_interpreter() -> None:
    """Keep the event loop and the garbage collector from delaying the engine by more than a step.

    Loaded objects stay until the process ends. A garbage collection over them takes 0.1 s, in which no thread runs.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def _announce(name: str, instance: Instance, settings: Settings, progress: Progress) -> None:
    """Report that the server is ready. The process that started the engine of chats connects by itself."""
    if instance.kind == "chat":
        return
    url, key = instance.api_url, _key_hint(settings)
    # shown only if the user can press Ctrl-C
    stop = "; Ctrl-C stops it" if sys.stdin is not None and sys.stdin.isatty() else ""
    progress.say(f"{name} is ready at {url} (OPENAI_BASE_URL={url}, {key}{stop})")
    if settings.ollama_port:
        progress.say(f"Clients of Ollama can use port {settings.ollama_port}.")
    if settings.tls_port:
        progress.say(f"Other machines can connect by HTTPS to port {settings.tls_port}.")


def _key_hint(settings: Settings) -> str:
    """Describe the key that programs must send."""
    if settings.api_key or settings.api_key_file:
        return "your API key"
    return "any API key" if sys.platform == "linux" else f"the API key in {own_key_file(settings)}"
