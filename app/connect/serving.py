"""The server for a client: a running one, or one that this starts, with a model that can do the job."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.chat_backend.engine.background import background_server
from app.client.running_server import FoundServer, servers_of_all
from app.connect.connection import Client, Connection
from app.connect.model_choice import (
    NATIVE,
    Candidate,
    ContextTooShort,
    NoSuitableModel,
    choose,
    of_files,
    of_name,
    of_server,
    shortcomings,
    trained_context,
)
from app.errors import ModelNotFound, NoServer
from app.process.engine_lease import hold_lease
from app.process.instance import BoxInstance, Instance, running_instances
from app.process.listening import base_url
from app.progress import Progress
from app.settings.api_keys import chosen_keys, make_own_key, own_key
from app.settings.boxes import find_box
from app.settings.settings import Settings

if TYPE_CHECKING:
    from app.client.own_server import ServerModel

_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True)
class ServedClient:
    """A client with its connection to a running server."""

    client: Client
    connection: Connection
    instance: Instance


@asynccontextmanager
async def served(client: Client, settings: Settings, progress: Progress) -> AsyncIterator[ServedClient]:
    """Find or start a server with a model that can do the job of a client. The server stays while the body runs.

    A model that the command line names is used in any case, with a warning. Raises NoSuitableModel, ContextTooShort,
    and the errors of the start and the load.
    """
    async with AsyncExitStack() as resources:
        server = await _server(client, settings, progress, resources)
        model = await _load(server, settings, progress)
        found = Candidate(model.name, model.tools == NATIVE, model.context_length or 0)
        if client.needs_tools and not found.has_tools:
            progress.say(f"{found.name} was not trained to call tools, which {client.title} needs. Replies may fail.")
        if found.context_length < client.least_context:
            raise ContextTooShort(shortcomings(client, found)[-1], _how_to_raise(client, server))
        # programs reach a box through a server of this machine, because they cannot check its certificate
        reached = server.instance if server.box is None else _held(servers_of_all(settings)[0], settings, resources)
        key = own_key(settings) if await asyncio.to_thread(_needs_key, reached) else None
        connection = Connection(reached.url, found.name, found.context_length, found.has_tools, key)
        yield ServedClient(client, connection, server.instance)


async def _server(client: Client, settings: Settings, progress: Progress, resources: AsyncExitStack) -> FoundServer:
    """Return a server, and the model that it has or that it will load."""
    is_named = settings.origins["model"].startswith("--")
    if not is_named:
        if (found := await _running_server(client, settings)) is not None:
            _held(found.instance, settings, resources)
            return found
        settings = await asyncio.to_thread(_with_stored_model, client, settings)
    is_here = await asyncio.to_thread(find_box, settings.model, settings.state_dir) is None
    flags = await asyncio.to_thread(_flags, client, settings, progress) if is_here else {}
    return await resources.enter_async_context(background_server(settings, progress, flags))


def _held(instance: Instance, settings: Settings, resources: AsyncExitStack) -> Instance:
    """Keep a running server until the resources are released, and return it."""
    if instance.kind == "chat":
        resources.enter_context(hold_lease(settings, instance.pid))
    return instance


async def _running_server(client: Client, settings: Settings) -> FoundServer | None:
    """Return a running server with its model that suits a client; None if no server runs. Raises NoSuitableModel."""
    with suppress(NoServer):
        instance, *_ = servers_of_all(settings)
        models = await _models(instance, settings)
        return FoundServer(instance, choose(client, of_server(models), settings).name)
    return None


def _with_stored_model(client: Client, settings: Settings) -> Settings:
    """Return settings with the name of a stored model that suits a client, or with the default model.

    Raises NoSuitableModel.
    """
    try:
        return replace(settings, model=choose(client, of_files(settings), settings).option)
    except NoSuitableModel:
        if client.needs_tools:  # the default model has none
            raise
        return settings


def _flags(client: Client, settings: Settings, progress: Progress) -> dict[str, object]:
    """Return the settings of a new server that differ from those of the user: a context that is long enough."""
    if settings.origins["context"].startswith("--"):
        return {"context": settings.context}
    limits = list(filter(None, (settings.context, trained_context(settings))))
    if all(limit >= client.least_context for limit in limits):
        return {}
    progress.say(f"The context is raised from {min(limits):,} to {client.least_context:,} tokens for {client.title}.")
    return {"context": client.least_context}


async def _load(server: FoundServer, settings: Settings, progress: Progress) -> "ServerModel":
    """Load the model of a server, and return its description."""
    from app.client.own_server import Client as ServerClient

    async with ServerClient(server.instance, own_key(settings)) as client:
        await client.load_with_progress(server.model, progress)
        models = await client.models()
    return next((one for one in models if server.model in one.names), models[0])


def _how_to_raise(client: Client, server: FoundServer) -> str:
    if server.box is not None:
        return f"On {server.box.name}, run ingle serve with --context {client.least_context}."
    stop = f"ingle stop {server.instance.port}"
    if server.instance.kind == "chat":
        return f"{stop}, then run this command again with --model {server.model}."
    return f"{stop} && ingle serve --model {server.model} --context {client.least_context}"


def _needs_key(instance: Instance) -> bool:
    """Whether a server needs a key from programs of this user."""
    import httpx

    return httpx.get(f"{instance.url}/v1/models", trust_env=False).status_code == _UNAUTHORIZED


async def lasting_connection(client: Client, settings: Settings) -> tuple[Connection, Instance | None]:
    """Return the connection to the server of `ingle serve`, and this server; None: it does not run.

    The model is that of the command line, or one that can do the job of the client. It is not loaded. Raises
    ModelNotFound, NoSuitableModel, and NoServer if it is a model of a box and no server passes requests on.
    """
    servers = [one for one in running_instances(settings) if one.serves_all and one.kind == "server"]
    server = min(servers, key=lambda one: one.port != settings.port, default=None)
    box = find_box(settings.model, settings.state_dir)
    if server is None:
        if box is not None:
            raise NoServer(f"no server runs that passes requests on to {box.name}", "ingle serve")
        found = await asyncio.to_thread(_stored_candidate, client, settings)
        key = make_own_key(settings) if chosen_keys(settings) or sys.platform != "linux" else None
        url = base_url(settings.host, settings.port)
        return Connection(url, found.name, found.context_length, found.has_tools, key, found.file), None
    models = await _models(server if box is None else BoxInstance.of(box), settings)
    if settings.origins["model"].startswith("--"):
        named = [*of_server([one for one in models if settings.model in one.names])]
        if not named:
            raise ModelNotFound(f"the server on port {server.port} has no chat model {settings.model}", "ingle ls")
        found = named[0]
    else:
        found = choose(client, of_server(models), settings)
    key = own_key(settings) if await asyncio.to_thread(_needs_key, server) else None
    return Connection(server.url, found.name, found.context_length, found.has_tools, key), server


def _stored_candidate(client: Client, settings: Settings) -> Candidate:
    """Return the stored model for a client, with the context that fits in the memory."""
    from app.models.fit import fit_model

    is_named = settings.origins["model"].startswith("--")
    found = of_name(settings) if is_named else choose(client, of_files(settings), settings)
    caches = fit_model(found.option, replace(settings, model=found.option, offline=True)).fit.caches
    return replace(found, context_length=min(caches[0].context, found.context_length) if caches else 0)


async def _models(instance: Instance, settings: Settings) -> "Sequence[ServerModel]":
    from app.client.own_server import Client as ServerClient

    async with ServerClient(instance, own_key(settings)) as server:
        return await server.models()
