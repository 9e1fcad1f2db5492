"""The tensor types of GGUF files: the number of elements and bytes in one block.

The table has all types, so the size of any tensor can be checked. Fewer types can be decoded: `quant.ggml_blocks` lists
them. The type numbers are those of the `gguf` package.
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
        """Return the size of `elements` elements in bytes. `elements` must be a multiple of `block_elements`."""
        return elements // self.block_elements * self.block_bytes


@functools.cache
def ggml_types() -> Mapping[int, GGMLType]:
    """Return all types, keyed by their number in files."""
    # local import: it imports numpy, which would slow down commands that open no file
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): GGMLType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
