"""Content parts of OpenAI's APIs become text."""

from typing import Any

import msgspec
import pytest

from app.generation.conversation import InvalidMessage
from app.server.dialects.openai.content_parts import ContentPart, attachments_of, text_of


def parts(*given: dict[str, Any]) -> list[ContentPart]:
    return msgspec.convert(given, list[ContentPart])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("as it is", "as it is"),
        ([], ""),
        (parts({"type": "text", "text": "a"}), "a"),
        (parts({"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}), "a\nb"),
        (parts({"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "no"}), "a\nno"),
        (
            parts({"type": "image"}, {"type": "file"}),
            "[image that this model cannot see]\n[document that this model cannot read]",
        ),
    ],
)
def test_content_parts_become_text(content: str | list[ContentPart] | None, text: str) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize(
    "part",
    [{"type": "input_audio", "input_audio": {}}, {"type": "text"}, {"type": "refusal", "text": "a"}, {"type": ""}],
)
def test_parts_without_text_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match="text only"):
        text_of(parts({"type": "text", "text": "before"}, part))


def test_files_have_their_name_and_type() -> None:
    link = {"type": "input_file", "file_url": "https://example.com/a.pdf?key=1"}
    data = {"type": "file", "file": {"filename": "b.pdf", "file_data": "data:application/pdf;base64,AAAA"}}
    found = attachments_of(parts(link, {"type": "text", "text": "a"}, data), "messages[0].content")
    assert [(one.path, one.name, one.media_type) for one in found] == [
        ("messages[0].content[0]", "a.pdf", ""),
        ("messages[0].content[2]", "b.pdf", "application/pdf"),
    ]
