"""Content parts of messages in OpenAI's APIs: texts, and images and files, which words replace."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from app.generation.attachments import Attachment, AttachmentKind
from app.generation.conversation import InvalidMessage

# Types of parts that hold text. The text of a refusal is in another field.
_TEXTS: Final = frozenset(("text", "input_text", "output_text", "reasoning_text", "summary_text"))
_ATTACHMENTS: Final[dict[str, AttachmentKind]] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "file": "document",
    "input_file": "document",
}


class ImageURL(Struct):
    url: str = ""


class File(Struct):
    filename: str | None = None
    file_data: str | None = None  # a data URL


class ContentPart(Struct, omit_defaults=True):
    """A part of any type. Chat completions and responses have attachments in different fields."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageURL | None = None
    file: File | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None

    def attachment(self, path: str) -> Attachment | None:
        """Return the image or document in this part, which is at `path` in the request; None: it has none."""
        if (kind := _ATTACHMENTS.get(self.type)) is None:
            return None
        if kind == "image":
            address = self.image_url.url if isinstance(self.image_url, ImageURL) else self.image_url
            return Attachment.at(kind, path, address or "")
        file = self.file or File(self.filename, self.file_data)
        return Attachment.at(kind, path, file.file_data or self.file_url or "", file.filename)

    def to_text(self) -> str:
        """Return the text, or the words for an attachment. Raises InvalidMessage for another type."""
        attached = self.attachment("")
        text = attached.words if attached else self.text if self.type in _TEXTS else None
        text = self.refusal if self.type == "refusal" else text
        if text is None:
            raise InvalidMessage(
                f"A part of type {self.type!r} has no usable text; this version reads text only",
                "Send text, without audio.",
            )
        return text


Content: TypeAlias = str | Sequence[ContentPart] | None


def text_of(content: Content) -> str:
    """Return the text of a message's content. Parts are joined by line breaks. Raises InvalidMessage."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.to_text() for part in content)


def attachments_of(content: Content, path: str) -> Iterator[Attachment]:
    """Yield the images and documents of a message's content, which is at `path` in the request."""
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if (attached := part.attachment(f"{path}[{index}]")) is not None:
            yield attached
