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
LOCAL = re.compile(r"\b(?:STL|LDL)\b")  # instructions that store to and load from local memory: spills


@dataclass(frozen=True)
class Machine:
    """What one program of a kernel takes."""

    registers: int  # of a thread
    spills: int  # instructions that move a register to memory or back
    shared: int  # bytes


def compiled(launch: Launch, architecture: int) -> Machine:
    """Raises whatever Triton does where it does not compile. Triton keeps machine code in its cache."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _told("cuobjdump", "--dump-resource-usage", file.name)
        stack = int(_number(r"STACK:(\d+)", usage))
        spills = len(LOCAL.findall(_told("cuobjdump", "--dump-sass", file.name))) if stack else 0
    return Machine(_number(r"REG:(\d+)", usage), spills, kernel.metadata.shared)


def _told(program: str, *arguments: str) -> str:
    done = subprocess.run([BINARIES / program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])
