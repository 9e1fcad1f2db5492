"""Finds the running servers of a model, and those that load any model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import AppError, NoServer
from app.process.instance import Instance, running_instances
from app.settings.settings import Settings
from quant.errors import ModelFileError

if TYPE_CHECKING:
    from app.models.store import ModelStore
    from app.models.stored_model import StoredModel


def find_instance(settings: Settings) -> Instance | None:
    """Return the running server of the model that the settings name, the first one of `find_instances`."""
    return next(iter(find_instances(settings)), None)


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
    return sorted(found, key=lambda instance: (instance.port != settings.port, instance.kind != "server"))


def _stored(store: "ModelStore", name: str) -> "StoredModel | None":
    """Return the stored model for a name that lacks the quantization or has a prefix. Does not read weights."""
    try:
        return store.resolve(name)
    except (AppError, ModelFileError):
        return None
