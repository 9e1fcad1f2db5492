"""Runs the engine and the HTTP server in this process, and decides the order of startup and shutdown.

The port is opened before the model is loaded, so that a port in use is reported at once. At shutdown, the server first
refuses new connections. Then every stream gets a last event and the engine's thread ends. Then the connections close.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn
from starlette.types import ASGIApp

from app.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, InvalidSetting
from app.models.machine_memory import memory_limits
from app.models.pulls import Pulls
from app.models.resident import LoadTask, Policy
from app.models.residents import Residents
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.process.engine_lease import EngineLeases
from app.process.instance import Instance, recorded, running_instances, withdraw
from app.process.listening import EVERYWHERE, ListeningSockets, PortTaken, is_loopback
from app.process.signals import ending_signals
from app.progress import Progress
from app.settings.api_keys import chosen_keys, make_own_key, own_key_file
from app.settings.settings import Settings
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.models.load.model_loader import LoadedChat, LoadedEmbedder, ModelLoader
    from app.server.application import AccessPolicy, ServerContext
    from app.server.machine import Machine
    from app.server.served_models import GivenModel, LoadedModel, ServedModels

# seconds for the current step, and for clients to read their last event; then connections are aborted
STOP_SECONDS = 1.8
# seconds between two checks whether the engine has failed, and from then until the server stops: health checks see it
FAILURE_SECONDS = 1.0
_MAX_HEADER_BYTES = 64 << 10

# Seconds after which a thread that runs Python code gives up the interpreter lock. This is longer than the Python part
# of a step, which should not be interrupted, and shorter than a whole step, so that the event loop is not blocked.
SWITCH_SECONDS = 0.0005


def run_host(settings: Settings, progress: Progress, leases: EngineLeases | None = None) -> None:
    """Download and load the default model, then serve all models until SIGINT, SIGTERM, or SIGHUP, or until the
    `leases` expire.

    Raises PortTaken, InvalidSetting, and the errors of `pull` and `load_model`. A second Ctrl-C ends the process.
    """
    policy = _access_policy(settings)
    with closing(_listen(settings)) as sockets:
        given = [pull(name, settings, progress) for name in (settings.model, *settings.more_models)]
        from app.models.load.model_loader import ModelLoader  # imports torch, which takes a second
        from app.server.application import ServerContext

        store = ModelStore(settings)
        names = _given_models(given, settings)
        titles = {model.key: model.names[0] for model in names}
        with closing(ModelLoader(settings, store, {one.name: one for one in given}, titles, progress)) as loader:
            model = loader.load(given[0].name, {}, LoadTask())
            models = _served_models(loader, store, names, settings)
            instance = replace(
                _instance(given[0], settings.host, sockets.port),
                kind="server" if leases is None else "chat",
                context_length=_context_length(model),
            )
            pulls = Pulls(settings, store)
            context = ServerContext(
                policy=policy,
                pulls=pulls,
                state_dir=settings.state_dir,
                machine=_machine(settings),
                keep_changing_lines=settings.keep_changing_lines,
            )
            with recorded(instance, settings):
                work = _PendingWork(models.residents, pulls)
                asyncio.run(_serve(models, model, sockets, instance, context, work, settings, progress, leases))


def _given_models(given: Sequence[StoredModel], settings: Settings) -> "list[GivenModel]":
    """Return the models of the command line with their names. The first of them has the names of --alias."""
    from app.server.served_models import GivenModel

    default, *others = given
    names = tuple(settings.alias) or (default.served_name,)
    return [GivenModel(default.name, names), *(GivenModel(one.name, (one.served_name,)) for one in others)]


def _served_models(
    loader: "ModelLoader", store: ModelStore, given: "Sequence[GivenModel]", settings: Settings
) -> "ServedModels":
    """Return the models of the server: the given ones, and all that are stored on this machine."""
    from app.server.served_models import ModelNames, ServedModels

    def known(name: str) -> str | None:
        found = store.find_known(name)
        return None if found is None else found.name

    def stored_names() -> list[str]:
        return [model.name for model in store.entries()]

    titles = {model.key: model.names[0] for model in given}

    def policy(name: str) -> Policy:
        of_model = settings.of_model(name, titles.get(name, name))
        seconds = settings.idle_unload_s or None
        kept = seconds if of_model.keep_alive_s is None else of_model.keep_alive_s
        return Policy(titles.get(name, name), of_model.pin, kept)

    aliases = {alias: name for name, of_model in settings.models.items() for alias in of_model.aliases}
    return ServedModels(
        Residents(loader, policy, memory_limits(settings)),
        ModelNames(given, {**aliases, **settings.model_aliases}, known, stored_names),
        loader.describe,
        generic_tools=settings.generic_tools,
        uses_recommended=settings.sampling_defaults != "none",
    )


def _access_policy(settings: Settings) -> "AccessPolicy":
    """Return the rules by which requests are accepted.

    Raises InvalidSetting if other machines could connect without a key, or if a key cannot be read.
    """
    from app.server.application import AccessPolicy
    from app.server.http.access import Authenticator

    keys = chosen_keys(settings)
    if not keys and not is_loopback(settings.host):
        raise InvalidSetting(
            f"--host {settings.host} accepts other machines, and no API key is set",
            "Set a key with INGLE_API_KEY or --api-key-file, or leave --host out.",
        )
    names = (settings.host, *settings.host_names)
    authenticator = Authenticator(keys, make_own_key(settings))
    return AccessPolicy(authenticator, names, settings.allowed_origins, settings.max_requests)


def _machine(settings: Settings) -> "Machine":
    from app.models.load.kernel_preparation import common_options
    from app.server.machine import GpuMemory, Machine
    from engine.backends.device_choice import gpu_for

    gpu = gpu_for(common_options(settings))
    memory = None if gpu is None else GpuMemory(gpu.card.memory_bytes, gpu.free_memory, gpu.own_memory)
    limit = settings.kv_disk_limit
    return Machine(None if limit == 0 else settings.kv_disk_dir, limit, memory)


def _listen(settings: Settings) -> ListeningSockets:
    """Listen on the server's port, and also on Ollama's port if the settings ask for it."""
    with ExitStack() as opened:
        sockets = opened.enter_context(closing(_listen_on_port(settings)))
        if settings.ollama_port:
            sockets.add(ListeningSockets(settings.ollama_port, settings.host, option="--ollama-port"))
        opened.pop_all()
    return sockets


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
        raise problem


def _instance(stored: StoredModel, host: str, port: int) -> Instance:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    address = f"[{host}]" if ":" in host else host
    reachable = "127.0.0.1" if is_loopback(host) or host in EVERYWHERE else address
    url, path = f"http://{reachable}:{port}", str(stored.path.absolute())
    return Instance(os.getpid(), port, url, stored.name, path, now, serves_all=True)


def _context_length(model: "LoadedChat | LoadedEmbedder") -> int | None:
    from app.models.load.model_loader import LoadedChat

    return model.service.context_length if isinstance(model, LoadedChat) else None


@dataclass(frozen=True, slots=True)
class _PendingWork:
    """All work for which requests wait."""

    residents: "Residents[LoadedModel]"
    pulls: Pulls

    @property
    def failure(self) -> str:
        return self.residents.failure

    async def stop(self) -> None:
        await asyncio.gather(self.residents.close(), self.pulls.close())


async def _serve(
    models: "ServedModels",
    default: "LoadedChat | LoadedEmbedder",
    sockets: ListeningSockets,
    instance: Instance,
    context: "ServerContext",
    work: "_PendingWork",
    settings: Settings,
    progress: Progress,
    leases: EngineLeases | None,
) -> None:
    from app.generation.request_log import write_request_log
    from app.server.application import create_application

    await default.start()
    models.residents.adopt(models.names.default.key, default)
    application = create_application(models, context)
    server = HTTPServer(
        server_config(application if leases is None else leases.track_requests(application)),
        work,
        lambda: _announce(models.names.default.names[0], instance, settings, progress),
        lambda status: _exit_now(instance, settings, status),
    )
    server.stop_on_signals()
    _tune_interpreter()
    if leases is not None:
        leases.exit_when_unused()
    with write_request_log(progress.say):
        await server.serve_until_failure(sockets.sockets)


def server_config(application: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's settings. Requests with a longer head than the limit are refused."""
    from app.server.dialects.openai.errors import ERRORS as OPENAI_ERRORS
    from app.server.http.connection import Connection

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


def _tune_interpreter() -> None:
    """Keep the event loop and the garbage collector from delaying the engine by more than a step.

    Loaded objects stay until the process ends. A garbage collection over them takes 0.1 s, in which no thread runs.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def _announce(name: str, instance: Instance, settings: Settings, progress: Progress) -> None:
    """Report that the server is ready. A chat has one line for it, and connects by itself."""
    if instance.kind == "chat":
        progress.say(f"{name} is ready.")
        return
    url, key = instance.api_url, _key_hint(settings)
    # shown only if the user can press Ctrl-C
    stop = "; Ctrl-C stops it" if sys.stdin is not None and sys.stdin.isatty() else ""
    progress.say(f"{name} is ready at {url} (OPENAI_BASE_URL={url}, {key}{stop})")
    if settings.ollama_port:
        progress.say(f"Clients of Ollama can use port {settings.ollama_port}.")


def _key_hint(settings: Settings) -> str:
    """Describe the key that programs must send."""
    if settings.api_key or settings.api_key_file:
        return "your API key"
    return "any API key" if sys.platform == "linux" else f"the API key in {own_key_file(settings)}"


def _exit_now(instance: Instance, settings: Settings, status: int) -> None:
    """End the process at once. The template process exits by itself when its pipe closes."""
    withdraw(instance, settings)
    os._exit(status)


class Computing(Protocol):
    """Work for which requests wait. `stop` ends it and notifies every request. `stop` may be called several times."""

    @property
    def failure(self) -> str:
        """The error after which no request can be served until the process starts again; empty if there is none."""
        ...

    async def stop(self) -> None: ...


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
    ) -> None:
        super().__init__(config)
        self._work = work
        self._announce = on_ready
        self._exit_now = exit_now

    async def serve_until_failure(self, sockets: list[socket.socket]) -> None:
        """Serve until the server is stopped. Raises EngineError if the engine fails for good.

        A supervisor of the process can then start it again, which is the only way to recover a GPU.
        """
        watching = asyncio.create_task(self._stop_on_failure())
        await self.serve(sockets)
        watching.cancel()
        if problem := self._work.failure:
            raise EngineError(f"The engine has failed: {problem}", "Start it again.")

    async def _stop_on_failure(self) -> None:
        while not self._work.failure:
            await asyncio.sleep(FAILURE_SECONDS)
        await asyncio.sleep(FAILURE_SECONDS)
        self.should_exit = True

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
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        status = EXIT_FAILURE if self._work.failure else EXIT_OK
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._exit_now, status)
        ending = asyncio.create_task(self._work.stop())  # starts when the listening sockets are closed
        await super().shutdown(sockets)  # waits until every running reply has been sent
        await ending
