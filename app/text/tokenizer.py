"""Text to token ids and back, for one vocabulary, over the `tokenizers` library.

What is text and what is markup is decided here and nowhere else: the library's tokenizer holds no control tokens at
all, so that plain text cannot become one, and control tokens are found by `ControlTokens`.

Knows ids, texts and bytes. Refuses to know file formats (gguf_tokenizer, json_tokenizer build what is used here), chat
templates, and whether a prompt begins with BOS: nothing is added to what is encoded.
"""

import array
import collections
import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import tokenizers

from app.errors import UnsupportedTokenizer
from app.text import long_texts
from app.text.control_tokens import ControlTokens
from app.text.long_texts import NO_LIMIT, TextLimit, encode_long, splits_exactly

# Characters of text whose ids are remembered: about a million tokens, 4 MB of ids. As many of contents are, marked.
REMEMBERED_CHARACTERS = 4_000_000

_AT_ONCE = 1 << 13  # ids that become bytes between two checks

V = TypeVar("V")

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
    response_template: Mapping[str, object] | None = None  # how replies are written, in transformers' words; unchecked


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


class _TextCache(Generic[V]):
    """What was found out about the texts seen last, so that a chat's history costs next to nothing per turn.

    Safe for several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, V] = collections.OrderedDict()
        self._characters = 0

    def get(self, text: str) -> V | None:
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
            return known

    def put(self, text: str, value: V) -> None:
        with self._lock:
            if text in self._known or len(text) > REMEMBERED_CHARACTERS:
                return
            self._known[text] = value
            self._characters += len(text)
            while self._characters > REMEMBERED_CHARACTERS:
                oldest, _ = self._known.popitem(last=False)
                self._characters -= len(oldest)


class TextEncoder:
    """Ids of plain text. Remembers what it encoded last. Safe for several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, start_prefix: str = "", verbatim: Sequence[str] = ()) -> None:
        """`start_prefix` goes in front of text that starts the input, unless that begins with a space or with one of
        the `verbatim` tokens."""
        self._backend = backend
        self._start_prefix = start_prefix
        self._unprefixed = (" ", SPACE_SYMBOL, *verbatim)
        self._remembered: _TextCache[array.array[int]] = _TextCache()
        self.characters_encoded = 0  # by the library; all others were remembered

    def encode(self, text: str, *, at_start: bool) -> Sequence[int]:
        """The ids of non-empty `text`; `at_start` if nothing stands before it."""
        if at_start and not text.startswith(self._unprefixed):
            text = self._start_prefix + text
        if (known := self._remembered.get(text)) is not None:
            return known
        self.characters_encoded += len(text)
        with library_errors("encoding text"):
            # A batch of one: unlike `encode`, it lets other threads run meanwhile.
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids = array.array("I", encoded[0].ids)
        self._remembered.put(text, ids)
        return ids


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
        self.response_template = vocabulary.response_template
        self.control_tokens = vocabulary.control.ids  # by text
        named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        # The texts that chat templates know by name, of those that the model has.
        self.special_tokens = {name: vocabulary.texts[id_] for name, id_ in named.items() if id_ is not None}
        self._no_text = vocabulary.hidden | frozenset(vocabulary.control.ids.values())
        self._protected: _TextCache[str] = _TextCache()

    def encode(self, text: str, *, parse_special: bool = False, limit: TextLimit = NO_LIMIT) -> list[int]:
        """The ids of `text`. Without `parse_special`, what looks like a control token is text like any other. Raises
        TextTooLong beyond the `limit`."""
        text = without_surrogates(text)
        limit.check_characters(len(text), self.longest_token)
        return self._encode_parts(self.split(text) if parse_special else [text] if text else [], limit)

    def protect(self, content: str) -> str:
        """`content` for use in a chat template, marked so that `encode_rendered` takes all of it for text."""
        if (known := self._protected.get(content)) is not None:
            return known
        protected = self._vocabulary.control.protect(content)
        self._protected.put(content, protected)
        return protected

    def encode_rendered(self, rendered: str, limit: TextLimit = NO_LIMIT) -> list[int]:
        """The ids of a rendered chat: control tokens of the template, and of nothing that went through `protect`.
        Raises TextTooLong beyond the `limit`."""
        return self._encode_parts(self.split(rendered, rendered=True), limit)

    def split(self, text: str, *, rendered: bool = False) -> Iterator[int | str]:
        """The control tokens in `text` and the non-empty plain texts between them; `rendered` if it is a rendered chat,
        in which what went through `protect` is plain."""
        return self._vocabulary.control.split(without_surrogates(text), marked=rendered)

    def encode_plain(self, text: str, *, at_start: bool, limit: TextLimit = NO_LIMIT) -> Sequence[int]:
        """The ids of one plain text, not empty, as `split` gives it; `at_start` if no token stands before it. Raises
        TextTooLong beyond the `limit`."""
        limit.check()
        if len(text) <= long_texts.PIECE:
            return self.encode_piece(text, at_start=at_start)
        return encode_long(self, text, at_start=at_start, limit=limit)

    def encode_continuation(self, text: str, limit: TextLimit = NO_LIMIT) -> Sequence[int] | None:
        """The ids of `text` that goes on in the middle of a plain text; None where the vocabulary has no way to say it,
        since it begins every text with a space. Raises TextTooLong beyond the `limit`."""
        return self._continuation(text, functools.partial(self.encode_plain, at_start=False, limit=limit))

    def encode_piece(self, text: str, *, at_start: bool) -> Sequence[int]:
        """See `PieceEncoder`."""
        return self._text_encoder.encode(text, at_start=at_start)

    def continue_piece(self, text: str) -> Sequence[int] | None:
        """See `PieceEncoder`."""
        return self._continuation(text, functools.partial(self.encode_piece, at_start=False))

    @functools.cached_property
    def splits_at_words(self) -> bool:
        """See `PieceEncoder`."""
        texts = (text for text in self._vocabulary.texts if text not in self.control_tokens)
        return splits_exactly(texts, self)

    def _continuation(self, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int] | None:
        """The ids of `text` after another text. If the vocabulary begins every text with a space, `text` is encoded
        after a line break, which most of these vocabularies join with nothing; None for the others."""
        if not self._begins_texts_with_space:
            return encode(text)
        ids, line_break = encode("\n" + text), self.encode_piece("\n", at_start=False)
        return ids[len(line_break) :] if ids[: len(line_break)] == line_break else None

    @functools.cached_property
    def _begins_texts_with_space(self) -> bool:
        """Also those that stand behind others."""
        return self.token_bytes(self.encode_piece("a", at_start=False)[0]).startswith(b" ")

    def _encode_parts(self, parts: Iterable[int | str], limit: TextLimit = NO_LIMIT) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self.encode_plain(part, at_start=not ids, limit=limit))
            limit.check_count(len(ids))
        return ids

    def decode(self, ids: Iterable[int], *, continues_text: bool = False, show_control: bool = False) -> str:
        """The text of `ids`, without control tokens unless they are to be shown; bytes that are no UTF-8 become U+FFFD.

        The space that a vocabulary puts in front of text is taken off again, except where the ids continue a text.
        """
        pieces = (self.token_bytes(token_id, show_control=show_control) for token_id in ids)
        text = b"".join(pieces).decode(errors="replace")
        return text.removeprefix(" ") if self.space_prefix and not continues_text else text

    def plain_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that plain text can be made of: none for all others, shown or not."""
        return b"" if token_id in self._no_text else self.token_bytes(token_id)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for at most: as many as it has bytes."""
        longest = 0
        lengths = [*map(len, map(str.encode, self._vocabulary.texts))]  # never less than the bytes it stands for
        for token_id in sorted(range(self.vocab_size), key=lengths.__getitem__, reverse=True):
            if lengths[token_id] <= longest:
                break
            longest = max(longest, len(self.token_bytes(token_id, show_control=True)))
        return longest

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Two vocabularies that have it in common give every id the same meaning."""
        vocabulary = self._vocabulary
        meaning = repr((tuple(vocabulary.texts), sorted(vocabulary.verbatim), sorted(self._no_text)))
        return hashlib.sha256(meaning.encode()).digest()

    @property
    def characters_encoded(self) -> int:
        """How many characters had to be encoded: texts that came again are remembered."""
        return self._text_encoder.characters_encoded

    def shown_bytes(self, ids: Sequence[int], check: Callable[[], None]) -> Iterator[bytes]:
        """The bytes of each id, control tokens included. Calls `check` now and then, which raises to end the work."""
        for start in range(0, len(ids), _AT_ONCE):
            check()
            yield from (self.token_bytes(one, show_control=True) for one in ids[start : start + _AT_ONCE])

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """The exact bytes that a token stands for: none for a control token, unless it is to be shown.

        An id past the vocabulary stands for nothing: models often have more rows than there are tokens.
        """
        vocabulary = self._vocabulary
        if not 0 <= token_id < self.vocab_size or (token_id in vocabulary.hidden and not show_control):
            return b""
        text = vocabulary.texts[token_id]
        return text.encode() if token_id in vocabulary.verbatim else vocabulary.to_bytes(text)

    def raw_text(self, token_id: int) -> str:
        """A token as the vocabulary's file writes it, such as `Ġthe`; empty for an id past the vocabulary."""
        return self._vocabulary.texts[token_id] if 0 <= token_id < self.vocab_size else ""


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot express, as U+FFFD."""
    try:
        text.encode()  # many times as fast as looking for one
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text
