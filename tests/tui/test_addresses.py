"""Tests for which addresses may be opened in a browser."""

import pytest

from tui.plain_text import is_web_address


@pytest.mark.parametrize("address", ["https://a.example/x?y#z", "http://127.0.0.1:8000/"])
def test_http_urls_may_be_opened(address: str) -> None:
    assert is_web_address(address)


@pytest.mark.parametrize(
    "address",
    ["javascript:alert(1)", "file:///etc/passwd", "https://", "ftp://a.example", "https://a.example/\x1b]0;x", "//a",
     "https://a.example/ b", "http://[", "https://\u202ea.example", ""],
)  # fmt: skip
def test_urls_other_than_http_are_rejected(address: str) -> None:
    assert not is_web_address(address)
