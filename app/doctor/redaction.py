"""Removes secrets, and the names of the user and of this machine, from text that leaves it."""

import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from getpass import getuser
from pathlib import Path

from app.errors import InvalidSetting
from app.settings.api_keys import chosen_keys, own_key
from app.settings.settings import Settings, secret_variables

SECRET = "(secret)"  # noqa: S105  # the replacement
_SHORTEST = 4  # characters of a secret; a shorter value would also be removed from other words
# Secrets that no setting names, by their form: tokens of the Hub and of API providers, and passwords in addresses.
_FORMS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?<=Bearer )\S+"),
)


def redactor(settings: Settings) -> Callable[[object], object]:
    """Return a function that redacts every string in a value of the types of JSON."""
    rules = [(re.compile(re.escape(secret)), SECRET) for secret in _secrets(settings)]
    rules += [(form, SECRET) for form in _FORMS]
    rules.append((re.compile(rf"{re.escape(str(Path.home()))}(?![\w.-])"), "~"))
    names = {"(host)": (platform.node(), platform.node().partition(".")[0]), "(user)": (_user(),)}
    for replacement, found in names.items():
        rules += [
            (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), replacement) for name in found if name
        ]

    def redact_text(text: str) -> str:
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        return text

    def redact(value: object) -> object:
        match value:
            case str() | Path():
                return redact_text(str(value))
            case Mapping():
                return {redact_text(str(key)): redact(one) for key, one in value.items()}
            case list() | tuple():
                return [redact(one) for one in value]
        return redact(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value

    return redact


def _secrets(settings: Settings) -> list[str]:
    """Return all secrets that this process can know, the longest first, so that none hides a part of another."""
    found = {*settings.api_key, settings.hub_token or "", own_key(settings) or "", *secret_variables()}
    with suppress(InvalidSetting):  # a file of keys that cannot be read
        found |= set(chosen_keys(settings))
    parts = {part for secret in found for part in (secret, *secret.split(","))}
    return sorted((part for part in parts if len(part) >= _SHORTEST), key=len, reverse=True)


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError):  # the user has no name
        return ""
