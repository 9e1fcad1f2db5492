"""Text to token ids and back, for one vocabulary, over the `tokenizers` library.

What is text and what is markup is decided here and nowhere else: the library's tokenizer holds no control tokens at
all, so that plain text cannot become one, and control tokens are found by `ControlTokens`.

Knows ids, texts and bytes. Refuses to know file formats (gguf_tokenizer, json_tokenizer build what is used here), chat
templates, and whether a prompt begins with BOS: nothing is added to what is encoded.
"""

import array
import collections
import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers

from app.control_tokens import ControlTokens
from app.errors import UnsupportedTokenizer

# Characters of text whose ids are remembered: about a million tokens, 4 MB of ids.
REMEMBERED_CHARACTERS = 4_000_000

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_SYMBOL = "\u2581"  # how SentencePiece writes a space


def _byte_level_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for.

    Source: GPT-2's encoder: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """The bytes of a byte-level token. Text with a character outside the alphabet is written out as it is."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()


def sentencepiece_bytes(text: str) -> bytes:
    """The bytes of a SentencePiece token: `<0x0A>` is that byte, `▁` a space."""
    if byte := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(byte[1], 16)])
    return text.replace(SPACE_SYMBOL, " ").encode()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a vocabulary mean. The builders validate it."""

    texts: Sequence[str]  # by id, as the file writes them; "" for an id that stands for nothing
    to_bytes: Callable[[str], bytes]  # of an ordinary token's text
    control: ControlTokens  # become ids in markup only
    verbatim: frozenset[int]  # ids whose text is written out as it is
    hidden: frozenset[int]  # ids that are no part of a reply's text
    bos_id: int | None
    eos_id: int | None  # ends a document; a chat's turn often ends with another token
    end_of_generation_ids: frozenset[int]  # after any of these a reply is over
    add_bos: bool  # the model expects BOS in front of a prompt
    space_prefix: bool  # text is encoded with a space put in front, which a reply then begins with, too
    chat_template: str | None  # Jinja source of the default template


@contextlib.contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn what the `tokenizers` library raises while `doing` something into UnsupportedTokenizer."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UnsupportedTokenizer(
            f"The tokenizer failed {doing}: {error}", "The model's tokenizer may be damaged: pull the model again."
        ) from error


class TextEncoder:
    """Ids of plain text. Remembers what it encoded last, so that a chat's history costs nothing per turn.

    Safe for several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, start_prefix: str = "", verbatim: Sequence[str] = ()) -> None:
        """`start_prefix` goes in front of text that starts the input, unless that begins with a space or with one of
        the `verbatim` tokens."""
        self._backend = backend
        self._start_prefix = start_prefix
        self._unprefixed = (" ", SPACE_SYMBOL, *verbatim)
        self._lock = threading.Lock()
        self._remembered: collections.OrderedDict[str, array.array[int]] = collections.OrderedDict()
        self._remembered_characters = 0

    def encode(self, text: str, *, at_start: bool) -> Sequence[int]:
        """The ids of non-empty `text`; `at_start` if nothing stands before it."""
        if at_start and not text.startswith(self._unprefixed):
            text = self._start_prefix + text
        with self._lock:
            if (known := self._remembered.get(text)) is not None:
                self._remembered.move_to_end(text)
                return known
        with library_errors("encoding text"):
            ids = array.array("I", self._backend.encode(text, add_special_tokens=False).ids)
        self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: "array.array[int]") -> None:
        with self._lock:
            if text in self._remembered or len(text) > REMEMBERED_CHARACTERS:
                return
            self._remembered[text] = ids
            self._remembered_characters += len(text)
            while self._remembered_characters > REMEMBERED_CHARACTERS:
                oldest, _ = self._remembered.popitem(last=False)
                self._remembered_characters -= len(oldest)


class Tokenizer:
    """One vocabulary's text <-> ids. Immutable to its users, and safe for several threads."""

    def __init__(self, text_encoder: TextEncoder, vocabulary: Vocabulary) -> None:
        self._text_encoder = text_encoder
        self._vocabulary = vocabulary
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_of_generation_ids = vocabulary.end_of_generation_ids
        self.add_bos = vocabulary.add_bos
        self.space_prefix = vocabulary.space_prefix
        self.chat_template = vocabulary.chat_template
        self.control_tokens = vocabulary.control.ids  # by text
        named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        # The texts that chat templates know by name, of those that the model has.
        self.special_tokens = {name: vocabulary.texts[id_] for name, id_ in named.items() if id_ is not None}

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of `text`. Without `parse_special`, what looks like a control token is text like any other."""
        text = _without_surrogates(text)
        parts = self._vocabulary.control.split(text) if parse_special else [text] if text else []
        return self._encode_parts(parts)

    def protect(self, content: str) -> str:
        """`content` for use in a chat template, marked so that `encode_rendered` takes all of it for text."""
        return self._vocabulary.control.protect(content)

    def encode_rendered(self, rendered: str) -> list[int]:
        """The ids of a rendered chat: control tokens of the template, and of nothing that went through `protect`."""
        return self._encode_parts(self._vocabulary.control.split(_without_surrogates(rendered), marked=True))

    def _encode_parts(self, parts: Iterable[int | str]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._text_encoder.encode(part, at_start=not ids))
        return ids

    def decode(self, ids: Iterable[int], *, continues_text: bool = False) -> str:
        """The text of `ids`, without control tokens; bytes that are no UTF-8 become U+FFFD.

        The space that a vocabulary puts in front of text is taken off again, except where the ids continue a text.
        """
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text.removeprefix(" ") if self.space_prefix and not continues_text else text

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """The exact bytes that a token stands for: none for a control token, unless it is to be shown.

        An id past the vocabulary stands for nothing: models often have more rows than there are tokens.
        """
        vocabulary = self._vocabulary
        if not 0 <= token_id < self.vocab_size or (token_id in vocabulary.hidden and not show_control):
            return b""
        text = vocabulary.texts[token_id]
        return text.encode() if token_id in vocabulary.verbatim else vocabulary.to_bytes(text)


def _without_surrogates(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot express, as U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)
