"""The innermost loops of machine code that cuobjdump prints: instructions by pipe, matrix products, and loads ahead."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.kernels.compilation import INSTRUCTION, JUMP

# Instructions by the pipe that runs them; those that are missing only take issue slots.
PIPES = {
    "alu": "LOP3 SHF PRMT IADD3 IADD VIADD LEA ISETP SEL FSEL FMNMX FSETP F2FP I2FP SGXT IMNMX VIMNMX PLOP3 IABS",
    "fma": "FFMA FMUL FADD HFMA2 HMUL2 HADD2",
    "imad": "IMAD IDP",
    "slow": "MUFU I2F F2I F2F POPC FLO",
    "memory": "LDG LDS LDSM LDL LDGSTS STG STS STL SHFL RED ATOM ATOMG LDC",
    "matrix": "HMMA IMMA QMMA OMMA HGMMA IGMMA QGMMA",
}
PIPE = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
# multiply-adds of a warp in one matrix instruction: the shape is 16816, or 64x128x16 for the four warps of a group
SHAPES = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32, "16864": 16 * 8 * 64}
WARP_SHAPE, GROUP_SHAPE = re.compile(r"\.(168\d+)"), re.compile(r"\.64x(\d+)x(\d+)")
NAME = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
REGISTER = re.compile(r"\bR(\d+)\b")
LOAD_BITS = re.compile(r"^(?:LDG|LDGSTS)\b.*?\.(128|64|U16|S16|U8|S8)\b")
BITS = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
WIDEST = 128  # bits


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction of a warp."""

    name: str  # without predicate and modifiers
    text: str  # without predicate

    @property
    def pipe(self) -> str:
        return PIPE.get(self.name, "other")

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a warp, if this is a matrix instruction, and otherwise 0."""
        if self.pipe != "matrix":
            return 0
        if group := GROUP_SHAPE.search(self.text):
            return 16 * int(group[1]) * int(group[2])
        shape = WARP_SHAPE.search(self.text)
        return SHAPES[shape[1]] if shape else 0

    @property
    def load_bits(self) -> int:
        """Bits that a thread loads from global memory, or 0."""
        found = LOAD_BITS.search(self.text)
        return BITS[found[1]] if found else 32 * (self.name in ("LDG", "LDGSTS"))

    def reads(self, registers: range) -> bool:
        """Whether a source operand is one of these registers. The first operand of a load or of arithmetic is its
        result.
        """
        operands = self.text.partition(" ")[2].split(",")
        sources = operands if self.name.startswith(("ST", "RED")) else operands[1:]
        return any(int(number) in registers for source in sources for number in REGISTER.findall(source))


@dataclass(frozen=True)
class Loop:
    """The body of a loop, as one warp runs it."""

    body: tuple[Instruction, ...]

    @cached_property
    def pipes(self) -> Counter[str]:
        return Counter(it.pipe for it in self.body)

    @cached_property
    def matrix(self) -> Counter[str]:
        """Multiply-adds by matrix instruction."""
        counts: Counter[str] = Counter()
        for it in self.body:
            counts[it.name] += it.multiply_adds
        return +counts

    @property
    def barriers(self) -> int:
        return sum(it.name == "BAR" for it in self.body)

    @property
    def loaded(self) -> int:
        """Bytes that a warp loads with the widest loads, which are contiguous. Others may load a value repeatedly."""
        return sum(32 * it.load_bits // 8 for it in self.body if it.load_bits == WIDEST)

    @property
    def loads_ahead(self) -> int | None:
        """The smallest number of instructions from a widest load to the first use of its registers, round the loop.

        None if the loop has no such load, or all of them write to shared memory.
        """
        loads = [(place, it) for place, it in enumerate(self.body) if it.name == "LDG"]
        widest = max((it.load_bits for _, it in loads), default=0)
        return min((self._distance(place, it) for place, it in loads if it.load_bits == widest), default=None)

    def _distance(self, place: int, load: Instruction) -> int:
        target = REGISTER.search(load.text)
        if target is None:
            return len(self.body)
        registers = range(int(target[1]), int(target[1]) + max(1, load.load_bits // 32))
        later = (*self.body[place + 1 :], *self.body[: place + 1])
        return next((number for number, it in enumerate(later, 1) if it.reads(registers)), len(self.body))


def innermost_loops(code: str) -> list[Loop]:
    """Return the loops that contain no other loop."""
    instructions = [(int(address, 16), text) for address, text in INSTRUCTION.findall(code)]
    jumps = [(int(found[1], 16), address) for address, text in instructions if (found := JUMP.search(text))]
    spans = {(first, last) for first, last in jumps if first < last}
    inner = [it for it in spans if not any(it[0] <= first and last <= it[1] for first, last in spans - {it})]
    return [Loop(tuple(_parsed(text for at, text in instructions if first <= at <= last))) for first, last in inner]


def main_loop(code: str) -> Loop | None:
    """Return the innermost loop with the most multiply-adds, or None if the code has no loop.

    The shortest of equal loops wins: the others also mask, and run for the ends of ranges only. Without matrix
    instructions, the longest wins.
    """
    loops = innermost_loops(code)
    most = max((it.matrix.total() for it in loops), default=0)
    equal = [it for it in loops if it.matrix.total() == most]
    return (min if most else max)(equal, key=lambda it: len(it.body), default=None)


def straight_code(code: str) -> Loop:
    """Return all instructions, as the body of a loop that runs once."""
    return Loop(tuple(_parsed(text for _, text in INSTRUCTION.findall(code))))


def _parsed(texts: Iterator[str]) -> Iterator[Instruction]:
    for text in texts:
        if (found := NAME.search(text)) and found[1] != "NOP":
            yield Instruction(found[1], text[found.start(1) :].strip())
