"""The tensor types of GGUF files: the elements and bytes of one block.

The size of a tensor of any of these types can be checked. `quant.ggml_blocks` has the types that can be decoded. The
type numbers are those of the `gguf` package.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One storage type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    def nbytes(self, elements: int) -> int:
        """Return the bytes of `elements` elements, a multiple of `block_elements`."""
        return elements // self.block_elements * self.block_bytes


@functools.cache
def ggml_types() -> Mapping[int, GGMLType]:
    """Return all types by their number in files."""
    from gguf.constants import GGML_QUANT_SIZES  # imports numpy, which commands that open no file should not wait for

    return {int(kind): GGMLType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
