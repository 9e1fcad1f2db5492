"""The `gguf` package's reader over plain arrays. With slices of a mapped array it takes 20 s for a large vocabulary."""

from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray


class Reader(gguf.GGUFReader):
    """Reads little-endian files. The interpretation of the bytes is the package's."""

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: str | None = None) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype, int(count), int(offset))
