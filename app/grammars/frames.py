"""What the server and its grammar processes exchange: frames, grammars as text, limits, and the error of a refusal.

A frame is a header (bytes of the payload, kind, number of the reply) and a payload. Both sides import this module, so
it imports the standard library alone.
"""

import enum
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

SIMPLIFY = "Use smaller counts, fewer alternatives, or fewer nested repetitions."


class GrammarProblem(Exception):
    """A grammar or schema that cannot be compiled, enforced or completed.

    `path` is the path of the part at fault, from the root of the schema.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path


# Between the parts of JSON there may be nothing, a space, or a line break with its indentation. Without a bound, a
# model that is not sure how to continue writes spaces forever.
WHITESPACE: Final = r"( |\n {0,32})?"
GrammarKind: TypeAlias = Literal["json", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """`text` is a JSON schema, a regular expression, or a grammar in the library's Lark or in llama.cpp's GBNF."""

    kind: GrammarKind
    text: str
    lenient: bool = False  # keywords of a schema that cannot be enforced are ignored
    whitespace: str | None = WHITESPACE  # between the parts of JSON, as a regular expression; None: nothing

    def packed(self) -> bytes:
        """As the payload of a frame."""
        return json.dumps(asdict(self)).encode()

    def guidance(self) -> dict[str, str | bool]:
        """How JSON is written, in the library's words."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}

    @classmethod
    def unpacked(cls, payload: bytes) -> "GrammarText":
        return cls(**json.loads(payload))


HEADER = struct.Struct("<IBI")
MAX_PAYLOAD = 64 << 20  # bytes; the largest is a vocabulary
READ_BYTES = 1 << 16


class Kind(enum.IntEnum):
    """What a frame is. The comments name the sender and the payload."""

    VOCABULARY = 0  # server: see `Vocabulary`; the first frame of a process that knows none
    READY = 1  # process: none
    COMPILE = 2  # server: a grammar's source, as JSON
    COMPILED = 3  # process: see `Problem`; none for a grammar that can be used
    ACCEPT = 4  # server: a token id and whether to jump
    ACCEPTED = 5  # process: whether the reply has ended, and the token ids that must follow
    MASK = 6  # server: none
    MASKED = 7  # process: a bit per token
    FAILED = 8  # process, in place of the two others: why the reply cannot go on, as text
    END = 9  # server: none; the reply has ended
    TOKENIZE = 10  # process: a text
    TOKENIZED = 11  # server: its token ids


ACCEPT = struct.Struct("<I?")
ENDED = struct.Struct("<?")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    reply: int = 0
    payload: bytes = b""


class ConnectionLost(Exception):
    """The other side is gone, or sends what no side of ours sends."""


class Channel:
    """Sends and receives frames over any stream of bytes."""

    def __init__(self, receive: Callable[[int], bytes], send: Callable[[bytes], object]) -> None:
        """`receive` returns about that many bytes, none at the end of the stream; `send` sends all of its bytes."""
        self._receive = receive
        self._send = send
        self._buffer = bytearray()

    def send(self, frame: Frame) -> None:
        """Raises ConnectionLost."""
        try:
            self._send(HEADER.pack(len(frame.payload), frame.kind, frame.reply) + frame.payload)
        except OSError as error:
            raise ConnectionLost from error

    def receive(self) -> Frame:
        """Raises ConnectionLost; TimeoutError if the stream has a time limit."""
        size, kind, reply = HEADER.unpack(self._take(HEADER.size))
        if size > MAX_PAYLOAD or kind not in _KINDS:
            raise ConnectionLost
        return Frame(Kind(kind), reply, self._take(size))

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                part = self._receive(max(READ_BYTES, size - len(self._buffer)))
            except TimeoutError:
                raise
            except OSError as error:
                raise ConnectionLost from error
            if not part:
                raise ConnectionLost
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


_KINDS = frozenset(Kind)


def packed_ids(ids: Iterable[int]) -> bytes:
    """Token ids as the payload of a frame."""
    several = list(ids)
    return struct.pack(f"<{len(several)}I", *several)


def unpacked_ids(payload: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(payload) // 4}I", payload)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as the grammar library wants them."""

    tokens: Sequence[bytes]  # by id
    special: Sequence[int]  # ids of control tokens
    ends: Sequence[int]  # ids of the tokens that end a reply: at least one
    bos: int | None

    _HEAD = struct.Struct("<IIIi")

    def packed(self) -> bytes:
        """As the payload of a frame."""
        head = self._HEAD.pack(
            len(self.tokens), len(self.special), len(self.ends), -1 if self.bos is None else self.bos
        )
        lengths = packed_ids(map(len, self.tokens))
        return b"".join((head, packed_ids(self.special), packed_ids(self.ends), lengths, *self.tokens))

    @classmethod
    def unpacked(cls, payload: bytes) -> "Vocabulary":
        count, specials, ends, bos = cls._HEAD.unpack_from(payload)
        start = cls._HEAD.size
        numbers = unpacked_ids(payload[start : start + 4 * (specials + ends + count)])
        start += 4 * len(numbers)
        tokens = []
        for length in numbers[specials + ends :]:
            tokens.append(payload[start : start + length])
            start += length
        return cls(tokens, numbers[:specials], numbers[specials : specials + ends], None if bos < 0 else bos)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a grammar is refused."""

    message: str
    path: str = ""  # the path of the part at fault, from the root of a schema
    trace: str = ""  # of a failure of the program itself

    def packed(self) -> bytes:
        """As the payload of a frame."""
        return json.dumps([self.message, self.path, self.trace]).encode()

    @classmethod
    def unpacked(cls, payload: bytes) -> "Problem":
        return cls(*json.loads(payload))


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a process may use for one grammar."""

    compile_cpu_seconds: float = 1.5
    compile_wall_seconds: float = 3.5  # more than the processor time, for a busy machine
    mask_cpu_seconds: float = 0.1  # of one mask or one token
    burst_cpu_seconds: float = 0.5  # of all masks and tokens together, more than `mean_cpu_seconds` of each
    mean_cpu_seconds: float = 0.01
    memory_bytes: int = 384 << 20  # of address space, more than the vocabulary takes
