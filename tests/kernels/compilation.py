"""A launch compiled for an architecture, and what its machine code takes of a multiprocessor."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.launches import Launch

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)  # its address, and what it is
LOCAL = re.compile(r"\b(?:STL|LDL)\b")  # that store to and load from local memory: spills
JUMP = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)")


@dataclass(frozen=True)
class Machine:
    """What one program of a kernel takes."""

    registers: int  # of a thread
    spills: int  # instructions that move a register to memory or back
    hot_share: float  # of the instructions of a loop without a loop in it: those, where they are most
    shared: int  # bytes


def compiled(launch: Launch, architecture: int) -> Machine:
    """Raises whatever Triton does where it does not compile. Triton keeps machine code in its cache."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _told("cuobjdump", "--dump-resource-usage", file.name)
        stack = _number(r"STACK:(\d+)", usage)
        spills = spills_of(_told("cuobjdump", "--dump-sass", file.name)) if stack else (0, 0.0)
    return Machine(_number(r"REG:(\d+)", usage), *spills, kernel.metadata.shared)


def spills_of(code: str) -> tuple[int, float]:
    """Of machine code as cuobjdump prints it: instructions that move a register to memory or back, and the share of
    them in that loop without a loop in it that has most."""
    instructions = [(int(address, 16), told) for address, told in INSTRUCTION.findall(code)]
    jumps = [(int(found[1], 16), address) for address, told in instructions if (found := JUMP.search(told))]
    loops = {(first, last) for first, last in jumps if first <= last}
    inner = [it for it in loops if not any(it[0] <= first and last <= it[1] for first, last in loops - {it})]
    spills = {address: bool(LOCAL.search(told)) for address, told in instructions}
    bodies = [[spills[it] for it in spills if first <= it <= last] for first, last in inner]
    return sum(spills.values()), max((sum(it) / len(it) for it in bodies), default=0.0)


def _told(program: str, *arguments: str) -> str:
    done = subprocess.run([BINARIES / program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])
