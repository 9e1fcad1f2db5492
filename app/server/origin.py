"""Where a request comes from, by what it says of itself: the one place that decides its class, for every dialect, and
reads whether it may be written to disk.

Whoever speaks first in this order wins: our own field, our header, OpenAI's tiers, what the request is for. Nothing
here knows what a class means to the engine.
"""

import enum
from collections.abc import Mapping

from app.server.errors import InvalidRequest
from engine.request import Origin, ServiceClass

CLASS_HEADER = "X-Ingle-Class"


class Purpose(enum.Enum):
    """What a request asks for, as far as that tells who waits."""

    CHAT = enum.auto()
    COMPLETION = enum.auto()
    INSERTION = enum.auto()  # text between two others, while somebody types


CLASS_NAMES: Mapping[str, ServiceClass] = {service.name.lower(): service for service in ServiceClass}

_OF_TIER: Mapping[str, ServiceClass] = {  # the other tiers say nothing
    "flex": ServiceClass.BACKGROUND,
    "priority": ServiceClass.INTERACTIVE,
}
_OF_PURPOSE: Mapping[Purpose, ServiceClass] = {
    Purpose.CHAT: ServiceClass.NORMAL,
    Purpose.COMPLETION: ServiceClass.NORMAL,
    Purpose.INSERTION: ServiceClass.INTERACTIVE,
}


def origin_of(
    purpose: Purpose,
    headers: Mapping[str, str],
    *,
    service_class: str | None = None,
    service_tier: str | None = None,
    priority: int | None = None,
    cache_salt: str | None = None,
    store: bool | None = None,
) -> Origin:
    """The origin of a request with these fields, which were checked. Raises InvalidRequest for a bad header."""
    said = (
        CLASS_NAMES.get(service_class or ""),
        _of_header(headers),
        _OF_TIER.get(service_tier or ""),
        _OF_PURPOSE[purpose],
    )
    service = next(one for one in said if one is not None)
    return Origin(service, priority or 0, cache_salt or "", stored=store is not False)


def _of_header(headers: Mapping[str, str]) -> ServiceClass | None:
    name = headers.get(CLASS_HEADER)
    if name is None:
        return None
    if name not in CLASS_NAMES:
        problem = f"{name!r} is not one of {', '.join(CLASS_NAMES)}"
        raise InvalidRequest(f"{CLASS_HEADER}: {problem}", parameter=CLASS_HEADER)
    return CLASS_NAMES[name]
