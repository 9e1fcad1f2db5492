"""Origin of a request: its service class, its caller and program, and whether it may be written to disk.

The class is the first of these that the request has: the field service_class, the header X-Ingle-Class, OpenAI's
service tier, and the purpose.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request

from app.server.http.access import CALLER, Caller
from app.server.http.errors import InvalidRequest
from app.server.http.seen import nonce_of
from engine.request import Origin, ServiceClass

CLASS_HEADER = "X-Ingle-Class"
MAX_CLIENT_NAME = 80  # characters; longer names are cut


class Purpose(enum.Enum):
    """Purpose of a request, as far as its class depends on it."""

    CHAT = enum.auto()
    COMPLETION = enum.auto()
    INSERTION = enum.auto()  # text between two others, while the user types


CLASS_NAMES: Mapping[str, ServiceClass] = {service.name.lower(): service for service in ServiceClass}

_CLASS_OF_TIER: Mapping[str, ServiceClass] = {  # other tiers do not set a class
    "flex": ServiceClass.BACKGROUND,
    "priority": ServiceClass.INTERACTIVE,
}
_CLASS_OF_PURPOSE: Mapping[Purpose, ServiceClass] = {
    Purpose.CHAT: ServiceClass.NORMAL,
    Purpose.COMPLETION: ServiceClass.NORMAL,
    Purpose.INSERTION: ServiceClass.INTERACTIVE,
}


@dataclass(frozen=True, slots=True)
class OriginFields:
    """Validated fields of a request that determine its origin."""

    purpose: Purpose
    service_class: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    store: bool | None = None


def origin_of(request: Request, fields: OriginFields, reply: str = "") -> Origin:
    """Return the origin of a request whose reply has the id `reply`. A nonce in the request is its id instead.

    Raises InvalidRequest if the class in the header is unknown.
    """
    return replace(
        caller_origin(request),
        service=class_of(request, fields),
        priority=fields.priority or 0,
        cache_salt=caller_of(request).cache_salt + (fields.cache_salt or ""),
        stored=fields.store is not False,
        reply=nonce_of(request) or reply,
    )


def caller_origin(request: Request) -> Origin:
    """Return the origin of a request that has no origin fields: its program, and the cache of its caller."""
    client = request.headers.get("user-agent", "")[:MAX_CLIENT_NAME]
    return Origin(cache_salt=caller_of(request).cache_salt, client=client)


def may_see(request: Request, origin: Origin) -> bool:
    """Whether the caller may see a request. Only the owner of the server sees requests with other keys."""
    return origin.cache_salt.startswith(caller_of(request).cache_salt)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request that passed the access checks."""
    caller: Caller = request.scope["state"][CALLER]
    return caller


def class_of(request: Request, fields: OriginFields | None = None) -> ServiceClass:
    """Return the class of a request with these fields, or without any. Raises InvalidRequest if its header has an
    unknown one.
    """
    in_header = _class_in(request.headers)
    if fields is None:
        return ServiceClass.NORMAL if in_header is None else in_header
    candidates = (
        CLASS_NAMES.get(fields.service_class or ""),
        in_header,
        _CLASS_OF_TIER.get(fields.service_tier or ""),
        _CLASS_OF_PURPOSE[fields.purpose],
    )
    return next(one for one in candidates if one is not None)


def _class_in(headers: Mapping[str, str]) -> ServiceClass | None:
    name = headers.get(CLASS_HEADER)
    if name is None:
        return None
    if name not in CLASS_NAMES:
        problem = f"{name!r} is not one of {', '.join(CLASS_NAMES)}"
        raise InvalidRequest(f"{CLASS_HEADER}: {problem}", parameter=CLASS_HEADER)
    return CLASS_NAMES[name]
