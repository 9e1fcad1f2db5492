"""Text that a model or a file wrote, made harmless for a terminal.

Knows which characters drive a terminal or hide text from its reader. Refuses to know what is printed and where.
"""

import re

# C0 but tab and newline, DEL and C1; the embeddings, overrides and isolates of bidirectional text, which make it read
# in another order than it has; the tag characters, which are invisible. Joiners stay: emoji and many scripts need them.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def sanitize(text: str) -> str:
    """`text` without control characters; a lone surrogate becomes U+FFFD.

    Works on each character alone: a sequence that is cut in two stays harmless, and pieces sanitize to what the whole
    does.
    """
    return _SURROGATE.sub("\ufffd", _UNSAFE.sub("", text))
