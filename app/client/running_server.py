"""Finds the running servers of a model, and those that load any model, and starts the installed service."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import AppError, NoServer
from app.process.instance import BoxInstance, Instance, running_instances
from app.process.listening import base_url
from app.settings.boxes import Box, find_box
from app.settings.settings import Settings
from quant.errors import ModelFileError

if TYPE_CHECKING:
    from app.models.store import ModelStore
    from app.models.stored_model import StoredModel


_WAKE_POLL_SECONDS = 0.2
_RECORD_SECONDS = 5.0  # time in which a server that is ready records itself


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A running server, and the name by which requests to it name the model of the settings."""

    instance: Instance
    model: str

    @property
    def box(self) -> Box | None:
        """The user's other machine that the server runs on; None: this machine."""
        return self.instance.box if isinstance(self.instance, BoxInstance) else None


def find_servers(settings: Settings) -> list[FoundServer]:
    """Return the running servers that have the model that the settings name, or load it when a request names it.

    The servers that were started with this model are first, then the one on the port of the settings. A model of a box
    has only the server of the box.
    """
    if (box := find_box(settings.model, settings.state_dir)) is not None:
        return [FoundServer(BoxInstance.of(box, settings.model), settings.model)]
    own = [FoundServer(instance, instance.model) for instance in find_instances(settings)]
    started_with_it = [found.instance for found in own]
    others = [one for one in running_instances(settings) if one.serves_all and one not in started_with_it]
    name = _stored_name(settings) if others else None
    return own if name is None else own + [FoundServer(one, name) for one in _sorted(others, settings)]


def find_instances(settings: Settings) -> list[Instance]:
    """Return all running servers of the model that the settings name, first the one on the port of the settings."""
    from app.models.store import ModelStore  # imported late, so that the screens of a chat appear sooner

    store = ModelStore(settings)
    entry = store.catalog.find(settings.model)
    repository = store.repository(settings.model)
    stored = None if entry else _stored(store, settings.model)
    path = os.path.realpath(stored.path if stored else os.path.expanduser(settings.model))

    def is_meant(instance: Instance) -> bool:
        if entry:
            return instance.model == entry.name
        if repository and instance.model == (stored.name if stored else str(repository)):
            return Path(instance.model_path).is_relative_to(settings.hub_cache)
        return os.path.realpath(instance.model_path) == path

    serving = [instance for instance in running_instances(settings) if is_meant(instance)]
    return sorted(serving, key=lambda instance: instance.port != settings.port)


def servers_of_all(settings: Settings) -> list[Instance]:
    """Return the running servers that load any stored model, first the one on the port of the settings.

    Returns only that one if the command line names the port. Raises NoServer if there is none.
    """
    is_given = settings.origins["port"].startswith("--")
    found = [
        one for one in running_instances(settings) if one.serves_all and (not is_given or one.port == settings.port)
    ]
    if not found:
        where = f" on port {settings.port}" if is_given else ""
        raise NoServer(f"no server is running{where}", "ingle serve")
    return _sorted(found, settings)


async def servers_or_service(settings: Settings) -> list[Instance]:
    """Return the servers of `servers_of_all`. If there is none, start the installed service. Raises NoServer."""
    try:
        return servers_of_all(settings)
    except NoServer:
        if await start_service(settings):
            return servers_of_all(settings)
        raise


async def start_service(settings: Settings) -> bool:
    """Start the server of the installed service by a request to its port, and wait until it is ready.

    Returns False if no service has the port of the settings, if its manager does not listen, or if the server ends.
    """
    from app.service.manager import service_has

    if not await asyncio.to_thread(service_has, settings.port, settings):
        return False
    import httpx

    unrecorded = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:  # noqa: S113 # the server answers when it runs
        while not any(one.port == settings.port for one in await asyncio.to_thread(running_instances, settings)):
            try:
                answer = await client.get(f"{base_url(settings.host, settings.port)}/health")
            except httpx.HTTPError:
                return False
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # it has loaded its model
                unrecorded += _WAKE_POLL_SECONDS
            if unrecorded > _RECORD_SECONDS:  # another program answers
                return False
            await asyncio.sleep(_WAKE_POLL_SECONDS)
    return True


def _sorted(instances: Sequence[Instance], settings: Settings) -> list[Instance]:
    return sorted(instances, key=lambda instance: (instance.port != settings.port, instance.kind != "server"))


def _stored_name(settings: Settings) -> str | None:
    """Return the name by which a server finds the model of the settings; None if it is not stored under a name."""
    from app.models.store import ModelStore

    try:
        found = ModelStore(settings).find_known(settings.model)
    except (AppError, ModelFileError):
        return None
    return None if found is None else found.name


def _stored(store: "ModelStore", name: str) -> "StoredModel | None":
    """Return the stored model for a name that lacks the quantization or has a prefix. Does not read weights."""
    try:
        return store.resolve(name)
    except (AppError, ModelFileError):
        return None
