"""The protocol between the server and its grammar processes: frames, grammars as text, limits, and errors.

A frame is a header (payload size in bytes, kind, number of the reply) and a payload. Both sides import this module, so
it imports only the standard library.
"""

import enum
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

SIMPLIFY = "Use smaller counts, fewer alternatives, or fewer nested repetitions."


class GrammarProblem(Exception):
    """A grammar or schema cannot be compiled, enforced, or completed.

    `path` leads from the root of the schema to the part at fault.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path


# White space between the parts of JSON: none, one space, or a line break with indentation. Without a limit, a model
# that is unsure how to continue may write spaces forever.
WHITESPACE: Final = r"( |\n {0,32})?"
GrammarKind: TypeAlias = Literal["json", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """The source of a grammar.

    It is a JSON schema, a regular expression, Lark in the library's dialect, or llama.cpp's GBNF.
    """

    kind: GrammarKind
    text: str
    lenient: bool = False  # whether keywords of a schema that cannot be enforced are ignored
    # regular expression of white space between the parts of JSON; None: no white space
    whitespace: str | None = WHITESPACE

    def packed(self) -> bytes:
        """Return the grammar as the payload of a frame."""
        return json.dumps(asdict(self)).encode()

    def guidance(self) -> dict[str, str | bool]:
        """Return the options of the library that set the format of JSON."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}

    @classmethod
    def unpacked(cls, payload: bytes) -> "GrammarText":
        return cls(**json.loads(payload))


HEADER = struct.Struct("<IBI")
MAX_PAYLOAD = 64 << 20  # bytes; a vocabulary is the largest payload
READ_BYTES = 1 << 16


class Kind(enum.IntEnum):
    """The kind of a frame. The comments name the sender, then the payload."""

    VOCABULARY = 0  # server: see `Vocabulary`; the first frame to a process without a vocabulary
    READY = 1  # process: none
    COMPILE = 2  # server: a grammar's source, as JSON
    COMPILED = 3  # process: see `Problem`; empty if the grammar is valid
    ACCEPT = 4  # server: whether to force tokens, and ids of tokens
    ACCEPTED = 5  # process: see `Accepted`, for each of the tokens
    MASK = 6  # server: the number of runs before the mask
    MASKED = 7  # process: one bit per token
    FAILED = 8  # process, instead of ACCEPTED and MASKED: why the reply cannot continue, as text
    END = 9  # server: none; the reply has ended
    TOKENIZE = 10  # process: a text
    TOKENIZED = 11  # server: its token ids
    LOOK_AHEAD = 12  # server: whether to force tokens, the maximum number of runs, and ids of drafted tokens
    LOOKED_AHEAD = 13  # process: the length of each run in tokens


ACCEPT = struct.Struct("<?")
LOOK_AHEAD = struct.Struct("<?I")
MASK = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    reply: int = 0
    payload: bytes = b""


class ConnectionLost(Exception):
    """The other process is gone, or has sent an invalid frame."""


class Channel:
    """Sends and receives frames over a byte stream."""

    def __init__(self, receive: Callable[[int], bytes], send: Callable[[bytes], object]) -> None:
        """Create a channel.

        `receive` takes a size hint and returns bytes, or none at the end of the stream. `send` sends all of its bytes.
        """
        self._receive = receive
        self._send = send
        self._buffer = bytearray()

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises ConnectionLost."""
        try:
            self._send(HEADER.pack(len(frame.payload), frame.kind, frame.reply) + frame.payload)
        except OSError as error:
            raise ConnectionLost from error

    def receive(self) -> Frame:
        """Return the next frame. Raises ConnectionLost, and TimeoutError if the stream has a time limit."""
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
    """Return token ids as the payload of a frame."""
    several = list(ids)
    return struct.pack(f"<{len(several)}I", *several)


def unpacked_ids(payload: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(payload) // 4}I", payload)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The state of a reply after a token."""

    ended: bool
    forced: Sequence[int]  # ids of the tokens that the grammar forces after it

    @staticmethod
    def packed(several: "Sequence[Accepted]") -> bytes:
        """Return the payload of a frame."""
        return b"".join(packed_ids((it.ended, len(it.forced), *it.forced)) for it in several)

    @classmethod
    def unpacked(cls, payload: bytes) -> "Sequence[Accepted]":
        numbers, start, several = unpacked_ids(payload), 0, []
        while start < len(numbers):
            stop = start + 2 + numbers[start + 1]
            several.append(cls(bool(numbers[start]), numbers[start + 2 : stop]))
            start = stop
        return several


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, in the form that the grammar library expects."""

    tokens: Sequence[bytes]  # indexed by id
    special: Sequence[int]  # ids of control tokens
    ends: Sequence[int]  # ids of the tokens that end a reply, at least one
    bos: int | None

    _HEAD = struct.Struct("<IIIi")

    def packed(self) -> bytes:
        """Return the vocabulary as the payload of a frame."""
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
    """The reason why a grammar is refused."""

    message: str
    path: str = ""  # path from the root of the schema to the part at fault
    trace: str = ""  # traceback if the grammar process itself failed

    def packed(self) -> bytes:
        """Return the problem as the payload of a frame."""
        return json.dumps([self.message, self.path, self.trace]).encode()

    @classmethod
    def unpacked(cls, payload: bytes) -> "Problem":
        return cls(*json.loads(payload))


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of a process for one grammar."""

    compile_cpu_seconds: float = 1.5
    compile_wall_seconds: float = 3.5  # seconds; longer than the CPU time, because the machine may be busy
    mask_cpu_seconds: float = 0.1  # limit for one mask or one token
    # limit for all masks and tokens together, in addition to `mean_cpu_seconds` for each
    burst_cpu_seconds: float = 0.5
    mean_cpu_seconds: float = 0.01
    memory_bytes: int = 384 << 20  # limit of the address space, not counting the vocabulary
