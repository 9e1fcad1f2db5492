"""Removes characters from text of a model or a file that could control a terminal."""

import re

# Removed: C0 except tab and newline, DEL, and C1; embeddings, overrides, and isolates of bidirectional text, which
# change its visible order; and tag characters, which are invisible. Joiners stay, because emoji and many scripts need
# them.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def sanitize(text: str) -> str:
    """Return `text` without control characters. Lone surrogates become U+FFFD.

    Each character is handled alone, so sequences that are split stay safe, and pieces give the same result as the
    whole.
    """
    return _SURROGATE.sub("\ufffd", _UNSAFE.sub("", text))
