"""The `gguf` package's reader over plain arrays: with slices of a mapped one, large vocabularies take it 20 s."""

from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray


class Reader(gguf.GGUFReader):
    """Of little-endian files. All that it makes of the bytes is the package's own."""

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: str | None = None) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype, int(count), int(offset))
