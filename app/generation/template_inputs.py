"""What chat templates get: default variables, and messages without a system role for templates that take none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from app.generation.messages import Json, Message

SYSTEM_ROLES: Final[Sequence[str]] = ("system", "developer")


def without_system_role(messages: Sequence[Message]) -> Iterator[Message]:
    """Each system message in front of the text of the next user message; the last ones as a user message."""
    texts: list[str] = []
    for message in messages:
        if message.role in SYSTEM_ROLES:
            texts.append(message.content)
        elif message.role == "user" and texts:
            yield replace(message, content="\n\n".join((*texts, message.content)))
            texts = []
        else:
            yield message
    if texts:
        yield Message("user", "\n\n".join(texts))


def default_variables(now: datetime) -> dict[str, Json]:
    """The variables by name; `now` is local time.

    Models think unless told otherwise: many templates close the thoughts where `enable_thinking` is not defined.
    `datetime` is the day alone, since a prompt with the time of day shares no prefix with any other prompt.
    """
    return {
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": "",  # Firefunction fails without it
    }
