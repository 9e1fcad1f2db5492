"""Write GGUF files byte by byte, well-formed or malformed, and record the position of every number in the header."""

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}

Value = int | float | str | list[int] | list[float] | list[str]


@dataclass(frozen=True)
class Number:
    """A number in the header: its position, its width in bytes, and its role."""

    offset: int
    width: int
    role: str


@dataclass
class GGUFBytes:
    """A file under construction. `numbers` lists every field that a mutation may change."""

    data: bytearray = field(default_factory=bytearray)
    numbers: list[Number] = field(default_factory=list)

    def number(self, code: str, value: float, role: str) -> None:
        packed = struct.pack("<" + code, value)
        self.numbers.append(Number(len(self.data), len(packed), role))
        self.data += packed

    def string(self, text: str | bytes, role: str) -> None:
        raw = text if isinstance(text, bytes) else text.encode()
        self.number("Q", len(raw), f"length of {role}")
        self.data += raw

    def value(self, kind: int, value: Value) -> None:
        self.number("I", kind, "value type")
        self.payload(kind, value)

    def payload(self, kind: int, value: Value) -> None:
        if kind == STRING:
            assert isinstance(value, str)
            self.string(value, "string")
        else:
            assert isinstance(value, int | float)
            self.number(CODES[kind], value, "scalar")

    def array(self, kind: int, values: list[int] | list[float] | list[str]) -> None:
        self.number("I", ARRAY, "value type")
        self.number("I", kind, "element type")
        self.number("Q", len(values), "array length")
        for value in values:
            self.payload(kind, value)


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. `dims` lists the innermost dimension first, as in the file."""

    name: str
    dims: list[int]
    kind: int
    data: bytes


def build(
    metadata: list[tuple[str, int, Value]], tensors: list[Tensor], *, version: int = 3, alignment: int = 32
) -> GGUFBytes:
    """Return the bytes of a well-formed file. Array values are (key, element type, list)."""
    out = GGUFBytes()
    out.data += b"GGUF"
    out.number("I", version, "version")
    out.number("Q", len(tensors), "tensor count")
    out.number("Q", len(metadata), "metadata count")
    for key, kind, value in metadata:
        out.string(key, "key")
        if isinstance(value, list):
            out.array(kind, value)
        else:
            out.value(kind, value)
    offset = 0
    for tensor in tensors:
        out.string(tensor.name, "tensor name")
        out.number("I", len(tensor.dims), "dimension count")
        for dim in tensor.dims:
            out.number("Q", dim, "dimension")
        out.number("I", tensor.kind, "tensor type")
        out.number("Q", offset, "tensor offset")
        offset += -(-len(tensor.data) // alignment) * alignment
    for tensor in tensors:
        out.data += bytes(-len(out.data) % alignment)
        out.data += tensor.data
    return out


def small_file(*, version: int = 3) -> GGUFBytes:
    """Return a small file with all scalar types, arrays of strings and numbers, and tensors of several types."""
    metadata: list[tuple[str, int, Value]] = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", U32, 32),
        ("a.u8", U8, 200),
        ("a.i8", I8, -5),
        ("a.u16", U16, 60_000),
        ("a.i16", I16, -3),
        ("a.i32", I32, -70_000),
        ("a.f32", F32, 0.5),
        ("a.bool", BOOL, 1),
        ("a.u64", U64, 2**63),
        ("a.i64", I64, -(2**40)),
        ("a.f64", F64, 1e-300),
        ("a.text", STRING, "grüße"),
        ("a.tokens", STRING, ["a", "", "ß", "▁the", "<|end|>"]),
        ("a.scores", F32, [0.0, -1.5, -2.25]),
        ("a.flags", BOOL, [0, 1, 1]),
        ("a.empty", I32, []),
    ]
    tensors = [
        Tensor("plain", [3, 2], 0, struct.pack("<6f", *range(6))),
        Tensor("half", [5], 1, bytes(10)),
        Tensor("q4", [64, 3], 2, bytes(range(108))),
        Tensor("q8", [32, 2, 2], 8, bytes(34 * 4)),
    ]
    return build(metadata, tensors, version=version)
