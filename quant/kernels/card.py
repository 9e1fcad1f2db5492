"""The card: what the choice of a kernel's configuration depends on, and nothing else of a GPU.

Plain numbers, so that kernels for any card can be chosen, and compiled, on a machine that has none.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability
    multiprocessors: int
    shared_memory: int  # bytes that one program may take
    l2_bytes: int
    memory_bytes: int
    interpreted: bool = False  # no GPU at all: kernels run on the CPU under Triton's interpreter, for tests

    @property
    def architecture(self) -> int:
        """As compilers name it: 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def multiplies_float8(self) -> bool:
        """Whether its matrix units take 8-bit floats."""
        return self.capability >= (8, 9)
