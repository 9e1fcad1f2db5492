"""Bounds how much the steps of a tokenizer can lengthen a text, so that a model file cannot exhaust the memory.

A tokenizer.json may list any number of normalizers and pre-tokenizers, and each may replace one character with many.
The bound is computed from the steps alone, before any text is encoded.

Source: the steps of the `tokenizers` library, and Unicode's longest decompositions.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from app.errors import UnsupportedTokenizer

# Maximum number of characters that one character may become. Tokenizers in use stay below 300: NFKC, lower case, a
# replacement, and the byte-level alphabet.
MAX_GROWTH = 512
MAX_ADDED = 1 << 12  # maximum number of characters added to a text
MAX_STEPS = 64

# Number of characters that one character may become, by step.
_UNICODE = {"NFD": 4, "NFKD": 18, "NFC": 3, "NFKC": 18, "Lowercase": 2, "ByteLevel": 4, "BertNormalizer": 4}
_PREFIXED = ("Metaspace", "ByteLevel")  # steps that may add a character before each piece


@dataclass(frozen=True, slots=True)
class TextGrowth:
    """A bound on the growth of text: n characters become at most `factor` * n + `added` characters."""

    factor: int = 1
    added: int = 0

    def then(self, other: "TextGrowth") -> Self:
        return type(self)(self.factor * other.factor, self.added * other.factor + other.added)


def check_growth(*steps: object) -> None:
    """Raise UnsupportedTokenizer if the steps together can make a text much longer.

    Each step is a normalizer or pre-tokenizer as in tokenizer.json, or None.
    """
    growth = TextGrowth()
    listed = [inner for step in steps for inner in _flat(step, MAX_STEPS)]
    for step in listed[: MAX_STEPS + 1]:
        growth = growth.then(_growth_of(step))
        if growth.factor > MAX_GROWTH or growth.added > MAX_ADDED:
            raise UnsupportedTokenizer(
                f"The tokenizer's normalizers can make a text more than {MAX_GROWTH} times as long",
                "The file may be forged. Choose another file of this model.",
            )
    if len(listed) > MAX_STEPS:
        raise UnsupportedTokenizer(
            f"The tokenizer has more than {MAX_STEPS} normalizers and pre-tokenizers",
            "Choose another file of this model.",
        )


def _flat(step: object, depth: int) -> list[Mapping[str, object]]:
    """Return the steps of a sequence, including those of nested sequences."""
    match step:
        case {"type": "Sequence", "normalizers": list(inner)} | {"type": "Sequence", "pretokenizers": list(inner)}:
            return [one for it in inner for one in _flat(it, depth - 1)] if depth else [{}] * (MAX_STEPS + 1)
        case Mapping():
            return [step]
    return []


def _growth_of(step: Mapping[str, object]) -> TextGrowth:
    match step:
        case {"type": "Prepend", "prepend": str(prefix)}:
            return TextGrowth(added=len(prefix))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return TextGrowth(max(1, -(-len(content) // len(pattern))))
        case {"type": "Replace", "content": str(content)}:  # a regular expression may match before each character
            return TextGrowth(1 + len(content), len(content))
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return TextGrowth(_longest_mapping(charsmap))
        case {"type": str(kind)}:
            prefixed = kind in _PREFIXED
            return TextGrowth(max(_UNICODE.get(kind, 1), 2 if prefixed else 1), 1 if prefixed else 0)
    return TextGrowth()


def _longest_mapping(charsmap: str) -> int:
    """Return the length of the longest replacement in SentencePiece's table: a trie, then texts that end with NUL."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        return 1  # the library refuses such a table
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))
