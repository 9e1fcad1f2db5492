"""Attachments: images and documents in a conversation, which no model here can read.

Words replace each attachment in the prompt. They depend only on its kind, name, and media type, so the prompt stays in
the prefix cache over the turns of a conversation. The data is neither decoded nor fetched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import unquote

from app.errors import AppError

AttachmentKind: TypeAlias = Literal["image", "document"]

MAX_NAME: Final = 100  # characters of a name in the prompt

_VERBS: Final[Mapping[AttachmentKind, str]] = {"image": "see", "document": "read"}
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}")
_LINK = re.compile(r"(?i:https?|file)://[^/?#]*([^?#]*)")


class AttachmentRefused(AppError):
    """An attachment that the settings refuse. `path` is its path in the request."""

    def __init__(self, attachment: "Attachment") -> None:
        verb = _VERBS[attachment.kind]
        remedy = f"Send text, without images and documents. The setting images = ignore replaces each {attachment.kind}"
        super().__init__(f"no model here can {verb} this {attachment.kind}", f"{remedy} by words.")
        self.path = attachment.path


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image or a document. The name and the media type are empty if they are unknown."""

    kind: AttachmentKind
    path: str  # path in the request, such as messages[0].content[1]
    name: str = ""
    media_type: str = ""

    @classmethod
    def at(
        cls, kind: AttachmentKind, path: str, address: str = "", name: str | None = None, media_type: str | None = None
    ) -> "Attachment":
        """Return the attachment at an address: a data URL, which has the media type, or a link, which may end with the
        name.

        `name` and `media_type` take precedence. A link is not opened, and its query is not used: it may change with
        each request.
        """
        link = _LINK.match(address)
        name = name or (unquote(link[1].rpartition("/")[2]) if link else "")
        media_type = media_type or (address[len("data:") :] if address[:5].lower() == "data:" else "")
        known = _MEDIA_TYPE.match(media_type)
        printable = "".join(character for character in name[: 2 * MAX_NAME] if character.isprintable())
        return cls(kind, path, printable[:MAX_NAME], known[0].lower() if known else "")

    @property
    def words(self) -> str:
        """The words that replace it in the prompt."""
        facts = ", ".join(filter(None, (self.name, self.media_type)))
        return f"[{self.kind} that this model cannot {_VERBS[self.kind]}{': ' if facts else ''}{facts}]"


def numbers_of(attachments: Sequence[Attachment]) -> tuple[str, ...]:
    """Return the number of attachments of each kind, such as "2 images"."""
    kinds = [attachment.kind for attachment in attachments]
    counts = [(kinds.count(kind), kind) for kind in _VERBS]
    return tuple(f"{count} {kind}{'' if count == 1 else 's'}" for count, kind in counts if count)
