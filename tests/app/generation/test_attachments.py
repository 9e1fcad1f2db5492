"""The words for attachments depend on their kind, name, and media type only."""

import pytest

from app.generation.attachments import MAX_NAME, Attachment, numbers_of


@pytest.mark.parametrize(
    ("address", "name", "media_type", "words"),
    [
        ("", None, None, ""),
        ("data:image/PNG;base64,AAAA", None, None, ": image/png"),
        ("DATA:image/svg+xml,<svg/>", "a.svg", None, ": a.svg, image/svg+xml"),
        ("data:,", None, None, ""),
        ("data:;base64,AAAA", None, None, ""),
        ("https://host/folder/a%20b.png?key=1#x", None, None, ": a b.png"),
        ("https://host/folder/a.png?key=2", None, "image/png", ": a.png, image/png"),
        ("file:///tmp/a.png", None, None, ": a.png"),
        ("https://host", None, None, ""),
        ("http://[", None, None, ""),
        ("iVBORw0KGgo=", None, None, ""),
        ("", "a\nb\x1b]c.png", None, ": ab]c.png"),
        ("", "n" * 10_000, None, f": {'n' * MAX_NAME}"),
        ("", "a.png", "no type", ": a.png"),
        ("", None, f"image/{'x' * 200}", f": image/{'x' * 64}"),
    ],
)
def test_words_name_known_facts(address: str, name: str | None, media_type: str | None, words: str) -> None:
    attachment = Attachment.at("image", "messages[0]", address, name, media_type)
    assert attachment.words == f"[image that this model cannot see{words}]"


def test_numbers_have_singular_and_plural() -> None:
    image, document = Attachment("image", "a"), Attachment("document", "b")
    assert numbers_of([]) == ()
    assert numbers_of([image, document, image]) == ("2 images", "1 document")
