"""Compile a launch for an architecture, and measure the resources of its machine code."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.launches import Launch

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)  # (address, instruction)
LOCAL = re.compile(r"\b(?:STL|LDL)\b")  # stores to and loads from local memory: spills
JUMP = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)")
# accesses to global memory, and the end of a program
FAULTS = re.compile(r"\b(?:LDG|LDGSTS|STG|LD|ST|ATOMG|ATOM|RED|REDG|UTMA\w+|UBLKCP|EXIT)\b")
WAIT = re.compile(r"^ACQBULK\b")  # griddepcontrol.wait
END = re.compile(r"^(?:EXIT|RET|BRA(?!\.))\b")  # after these, the next instruction does not run


@dataclass(frozen=True)
class Machine:
    """The resources of one program of a kernel."""

    registers: int  # registers per thread
    spills: int  # instructions that move a register to memory or back
    # share of spills among the instructions of an innermost loop, for the loop with the largest share
    loop_spill_share: float
    shared: int  # bytes of shared memory


def compile_launch(launch: Launch, architecture: int) -> Machine:
    """Compile a launch. Raises Triton's error if it does not compile. Triton caches machine code."""
    kernel = _compiled(launch, architecture)
    with _binary(kernel) as path:
        usage = _output_of("cuobjdump", "--dump-resource-usage", path)
        stack = _number(r"STACK:(\d+)", usage)
        spills = spills_of(_output_of("cuobjdump", "--dump-sass", path)) if stack else (0, 0.0)
    return Machine(_number(r"REG:(\d+)", usage), *spills, kernel.metadata.shared)


def machine_code(launch: Launch, architecture: int) -> str:
    """Return the machine code of a launch, as cuobjdump prints it."""
    with _binary(_compiled(launch, architecture)) as path:
        return _output_of("cuobjdump", "--dump-sass", path)


def _compiled(launch: Launch, architecture: int) -> Any:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)


@contextmanager
def _binary(kernel: Any) -> Iterator[str]:
    """Write the machine code of a compiled kernel to a temporary file, and yield its path."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        yield file.name


def spills_of(code: str) -> tuple[int, float]:
    """Count spills in machine code printed by cuobjdump.

    Returns the number of instructions that move a register to memory or back, and the largest share of them in an
    innermost loop.
    """
    instructions = [(int(address, 16), instruction) for address, instruction in INSTRUCTION.findall(code)]
    jumps = [
        (int(found[1], 16), address) for address, instruction in instructions if (found := JUMP.search(instruction))
    ]
    loops = {(first, last) for first, last in jumps if first <= last}
    inner = [it for it in loops if not any(it[0] <= first and last <= it[1] for first, last in loops - {it})]
    spills = {address: bool(LOCAL.search(instruction)) for address, instruction in instructions}
    bodies = [[spills[it] for it in spills if first <= it <= last] for first, last in inner]
    return sum(spills.values()), max((sum(it) / len(it) for it in bodies), default=0.0)


def faults_before_wait(code: str) -> list[str]:
    """Return the accesses to global memory, and the ends, that a program may reach before its wait for earlier kernels.

    If a program ended without a wait, the kernel after it would not wait for all earlier kernels.
    """
    instructions = {int(address, 16): text for address, text in INSTRUCTION.findall(code)}
    following = dict(pairwise(instructions))
    found, seen, left = [], set(), [min(instructions)]
    while left:
        address = left.pop()
        text = instructions[address]
        if address in seen or WAIT.search(text):
            continue
        seen.add(address)
        if FAULTS.search(text):
            found.append(text)
        if jump := JUMP.search(text):
            left.append(int(jump[1], 16))
        if not END.match(text) and address in following:
            left.append(following[address])
    return found


def _output_of(program: str, *arguments: str) -> str:
    done = subprocess.run([BINARIES / program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])
