"""A checkpoint's tensors, handed out by name and shape, ending with the proof that none is missing or left over.

Knows names, shapes, progress and the threads that load. Refuses to know what a layer does with a tensor.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from torch import Tensor

from engine.errors import UnsupportedModel
from quant.errors import ModelFileError
from quant.ggml_blocks import decode
from quant.ggml_types import GGMLType
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize
from quant.tensor import QTensor

LoadProgress = Callable[[int, int], None]  # bytes read so far, bytes in all; called by any thread, one at a time

Item = TypeVar("Item")
Made = TypeVar("Made")


class GGUFWeights:
    """Each tensor of an open file, once. Decoding copies, so the file may be closed when loading ends.

    Of the file's own bytes, no more stay in memory than those of the tensors that are being decoded.
    """

    def __init__(self, file: GGUFFile, progress: LoadProgress | None = None, threads: int = 1) -> None:
        self._file = file
        self._left = dict(file.tensors)
        self._total = sum(tensor.nbytes for tensor in file.tensors.values())
        self._done = 0
        self._progress = progress
        self._threads = threads
        self._lock = Lock()
        self._given_up = False

    @property
    def matrix_types(self) -> frozenset[GGMLType]:
        """The types that layers are made of."""
        return self._file.matrix_types

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> QTensor:
        """The tensor in canonical form. Raises ModelFileError when it is missing or not of `shape` (row-major)."""
        if self._given_up:
            raise CancelledError
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ModelFileError(f"{self._file.path} has no tensor {name}", "The file is incomplete: pull it again.")
        if tensor.shape != shape:
            raise ModelFileError(f"{self._file.path}: {name} has shape {tensor.shape}, and the model needs {shape}")
        weight = decode(tensor.type, self._file.data(name), shape)
        self._file.release(name)
        with self._lock:
            self._done += tensor.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        return weight

    def take_vector(self, name: str, length: int) -> Tensor:
        """A one-dimensional tensor as float32 [length]."""
        return dequantize(self.take(name, length))

    def together(self, load: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        """What `load` makes of each item, as many at a time as there are threads.

        Raises what the first item raises that fails. Then, as when the caller is interrupted, the others end with the
        tensor that they are at.
        """
        with ThreadPoolExecutor(self._threads, "loading") as pool:
            try:
                return list(pool.map(load, items))
            except BaseException:
                self._given_up = True
                raise

    def finish(self) -> None:
        """Raise UnsupportedModel when tensors are left: the model would compute something else without them."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(
                f"{self._file.path} has tensors this version does not use: {', '.join(names[:5])}{more}",
                "The model is a variant that is not supported yet.",
            )
