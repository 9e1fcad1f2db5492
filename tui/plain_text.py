"""Sanitizes untrusted text: makes characters visible that control a terminal or have no visible form.

The functions work on single characters, so a text may arrive in parts that are cut anywhere.
"""

import re
from pathlib import PurePath
from urllib.parse import urlsplit

_C0_PICTURES = 0x2400  # U+2400 SYMBOL FOR NULL; symbols of the other C0 controls follow in order
_DELETE = 0x7F

# All characters without a visible form: controls except tab and newline (C0, DEL, C1), soft hyphen, directional marks,
# embeddings and isolates, zero-width characters, fillers that look like spaces, interlinear marks, surrogates,
# noncharacters, tags, and the variation selectors that ordinary text does not need.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# Joiners (ZWNJ, ZWJ) belong to the spelling of Persian and Indic scripts, and build emoji. One is allowed after a
# character outside of Latin and punctuation, and at the start, because a text may arrive in parts.
_JOINED = r"(?<![\x00-\u02ff\u2000-\u206f])[\u200c\u200d]"
_UNSAFE = re.compile(f"\r\n|[\u2028\u2029]|({_JOINED})|[{_HIDDEN}]")
# a search with it first is three times as fast for text without such characters
_SUSPECT = re.compile(f"[\u2028\u2029{_HIDDEN}]")
_FENCE = re.compile(r"^…?[ \t]*(?:```|~~~)[^`\n]*$", re.MULTILINE)  # "…" marks omitted text in a search result


def sanitize(text: str) -> str:
    """Return `text` with newlines as line ends and with hidden characters made visible: ESC as ␛, U+202E as ‹U+202E›.

    The result contains no control characters except tab and newline. Sanitizing it again does not change it.
    """
    return _UNSAFE.sub(_visible, text) if _SUSPECT.search(text) else text


def sanitize_paste(text: str) -> str:
    """Sanitize pasted text. Terminals send line ends in it as carriage returns."""
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def single_line(text: str) -> str:
    """Sanitize a title or name, and replace its line ends and tabs with spaces."""
    return " ".join(sanitize(text).split())


def without_fences(text: str) -> str:
    """Return Markdown without the lines that open and close code blocks."""
    return _FENCE.sub("", text)


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of the text: its start and its end, with "…" between them."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def start(text: str, most: int) -> str:
    """Return the start of the text on one line, cut to `most` characters with "…" at the end."""
    line = single_line(text[: 2 * most])
    return line if len(line) <= most and len(text) <= 2 * most else f"{line[: most - 1]}…"


def break_paths(text: str, width: int) -> str:
    """Break words that are longer than a line of `width` characters after their slashes, as far as possible."""
    return re.sub(rf"\S{{{width + 1},}}", lambda word: _broken(word[0], width), text)


def _broken(word: str, width: int) -> str:
    lines = [""]
    for part in re.findall("[^/]*/|[^/]+", word):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def head(text: str, most: int) -> str:
    """Return the first `most` characters, followed by the number of omitted characters."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def _visible(match: re.Match[str]) -> str:
    found = match[0]
    if match[1]:
        return found
    if found in ("\r\n", "\u2028", "\u2029"):
        return "\n"
    code = ord(found)
    if code < 0x20:
        return chr(_C0_PICTURES + code)
    if code == _DELETE:
        return "\u2421"
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"‹U+{code:04X}›"


def capitalized(text: str) -> str:
    """Return a message with a capital at its start, unless its first word is a name, such as that of a model."""
    return f"{text[:1].upper()}{text[1:]}" if text.partition(" ")[0].isalpha() else text


def model_name(model: str) -> str:
    """Return the name to display for a model: the last component of a path, without ".gguf"."""
    path, is_file = PurePath(model), model.endswith(".gguf") and ":" not in model  # names and addresses have a colon
    return path.name.removesuffix(".gguf") if is_file or path.is_absolute() else model


def is_web_address(address: str) -> bool:
    """Whether the text is an address that may be opened in a browser after the user has agreed."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    plain = address.isprintable() and " " not in address and sanitize(address) == address
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)
