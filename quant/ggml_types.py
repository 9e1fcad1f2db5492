"""The tensor types that a GGUF file can name: the elements and the bytes of one block.

A tensor of any of these types can be measured and checked; `quant.ggml_blocks` has the types that can be decoded. The
numbers are those of the `gguf` package.
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
        """Bytes of `elements` elements; `elements` is a multiple of `block_elements`."""
        return elements // self.block_elements * self.block_bytes


@functools.cache
def ggml_types() -> Mapping[int, GGMLType]:
    """All types by the number that stands for each in a file."""
    from gguf.constants import GGML_QUANT_SIZES  # imports numpy, which programs that open no file start without

    return {int(kind): GGMLType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
