"""What can be done about an endpoint of others that refuses, is none, or has an address that is none."""

from collections.abc import Mapping

import httpx

from app.errors import InvalidSetting
from app.http_client import refusal
from quant.errors import InglenookError

NO_SENSE = "Check the address: that of an OpenAI-compatible server usually ends with /v1."
_KEY = "Give the key of this endpoint with --api-key-file."
_REMEDIES: Mapping[int, str] = {
    httpx.codes.UNAUTHORIZED: _KEY,
    httpx.codes.FORBIDDEN: _KEY,
    httpx.codes.TOO_MANY_REQUESTS: "Wait a moment, then try again.",
}


def checked_url(given: str) -> str:
    """The base URL that somebody gave, without a slash at its end. Raises InvalidSetting for what is none."""
    try:
        url = httpx.URL(given)
        is_complete = url.scheme in ("http", "https") and bool(url.host)
    except httpx.InvalidURL:
        is_complete = False
    if not is_complete:
        raise InvalidSetting(f"{given} is no URL of an endpoint", "It looks like http://127.0.0.1:8000/v1.")
    return given.rstrip("/")


def refused(url: str, status: int, content: bytes) -> InglenookError:
    """The error that an error answer of others stands for."""
    problem = refusal(status, content)
    lacks_version = status == httpx.codes.NOT_FOUND and not url.endswith("/v1")
    problem.remedy = problem.remedy or (NO_SENSE if lacks_version else _REMEDIES.get(status, ""))
    return problem
