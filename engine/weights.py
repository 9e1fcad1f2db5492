"""A checkpoint's tensors, handed out by name and shape, ending with the proof that none is missing or left over.

Knows names, shapes and progress. Refuses to know what a layer does with a tensor.
"""

from collections.abc import Callable

from torch import Tensor

from engine.errors import UnsupportedModel
from quant.errors import ModelFileError
from quant.ggml_blocks import decode
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize
from quant.tensor import QTensor

LoadProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


class GGUFWeights:
    """Each tensor of an open file, once. Decoding copies, so the file may be closed when loading ends."""

    def __init__(self, file: GGUFFile, progress: LoadProgress | None = None) -> None:
        self._file = file
        self._left = dict(file.tensors)
        self._total = sum(tensor.nbytes for tensor in file.tensors.values())
        self._done = 0
        self._progress = progress

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> QTensor:
        """The tensor in canonical form. Raises ModelFileError when it is missing or not of `shape` (row-major)."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ModelFileError(f"{self._file.path} has no tensor {name}", "The file is incomplete: pull it again.")
        if tensor.shape != shape:
            raise ModelFileError(f"{self._file.path}: {name} has shape {tensor.shape}, and the model needs {shape}")
        weight = decode(tensor.type, self._file.data(name), shape)
        self._done += tensor.nbytes
        if self._progress:
            self._progress(self._done, self._total)
        return weight

    def take_vector(self, name: str, length: int) -> Tensor:
        """A one-dimensional tensor as float32 [length]."""
        return dequantize(self.take(name, length))

    def finish(self) -> None:
        """Raise UnsupportedModel when tensors are left: the model would compute something else without them."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(
                f"{self._file.path} has tensors this version does not use: {', '.join(names[:5])}{more}",
                "The model is a variant that is not supported yet.",
            )
