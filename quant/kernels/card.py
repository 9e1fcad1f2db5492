"""The properties of a GPU on which the configuration of a kernel depends.

They are plain numbers, so that kernels for any card can be chosen and compiled on a machine without one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One model of GPU."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability
    multiprocessors: int
    shared_memory: int  # shared memory that one program may use, in bytes
    l2_bytes: int
    memory_bytes: int
    interpreted: bool = False  # no GPU: kernels run on the CPU under Triton's interpreter, for tests
    early_start_fails: bool = False  # whether a trial of `starts_early` failed

    @property
    def architecture(self) -> int:
        """Number of the architecture in compiler names: 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can start before the one before it has ended (`quant.kernels.early_start`)."""
        return self.capability >= (9, 0) and not self.interpreted and not self.early_start_fails

    @property
    def prefers_integers(self) -> bool:
        """Whether 8-bit integers are multiplied four times as fast as bfloat16 with float32 sums.

        This is so on GeForce cards. On workstation cards with the same chips, they are twice as fast.
        """
        return "GeForce" in self.name and self.capability >= (8, 6)

    @property
    def multiplies_float8(self) -> bool:
        """Whether the GPU converts 8-bit floats, and its matrix units multiply them."""
        return self.capability >= (8, 9)
