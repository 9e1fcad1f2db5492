"""System messages for chat templates that take none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from app.chat.messages import Message

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
