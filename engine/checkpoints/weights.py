"""The weights of a checkpoint, taken by name and shape; loading ends with a check that none is left."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TypeVar

from torch import Tensor

from engine.checkpoints.checkpoint import StoredWeight
from engine.errors import UnsupportedModel
from quant.errors import ModelFileError
from quant.kernels.reference import dequantize
from quant.tensor import QTensor

LoadProgress = Callable[[int, int], None]  # bytes read so far, bytes in all; called by any thread, one at a time

Item = TypeVar("Item")
Made = TypeVar("Made")


class Weights:
    """Each weight of an open checkpoint, once. Decoding copies, so the checkpoint may be closed when loading ends.

    Of the files' own bytes, no more stay in memory than those of the weights that are being decoded.
    """

    def __init__(
        self, path: Path, stored: Mapping[str, StoredWeight], progress: LoadProgress | None = None, threads: int = 1
    ) -> None:
        self._path = path
        self._stored = stored
        self._left = set(stored)
        self._total = sum(weight.nbytes for weight in stored.values())
        self._done = 0
        self._progress = progress
        self._threads = threads
        self._lock = Lock()
        self._given_up = False

    def matrix_samples(self) -> list[QTensor]:
        """A small matrix of every layout that layers are made of."""
        return matrix_samples(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> QTensor:
        """The weight in canonical form. Raises ModelFileError when it is missing or not of `shape` (row-major)."""
        if self._given_up:
            raise CancelledError
        if name not in self._left:
            raise ModelFileError(f"{self._path} has no tensor {name}", "The file is incomplete: pull it again.")
        self._left.discard(name)
        stored = self._stored[name]
        if stored.shape is not None:
            self._check(stored.name, stored.shape, shape)
        weight = stored.decode()
        self._check(stored.name, weight.shape, shape)
        with self._lock:
            self._done += stored.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        return weight

    def _check(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise ModelFileError(f"{self._path}: {name} has shape {shape}, and the model needs {wanted}")

    def drop(self, name: str) -> None:
        """Leave out a weight that the configuration says is not used."""
        self._left.discard(name)

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
        """All that the model needs was taken. Raise UnsupportedModel when tensors are left: it would compute something
        else without them."""
        if self._progress and self._done < self._total:  # some were dropped
            self._progress(self._total, self._total)
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(
                f"{self._path} has tensors this version does not use: {', '.join(names[:5])}{more}",
                "The model is a variant that is not supported yet.",
            )


def matrix_samples(stored: Mapping[str, StoredWeight]) -> list[QTensor]:
    """A small matrix of every layout that these matrices have."""
    return [weight.sample() for weight in smallest_matrices(stored).values()]


def smallest_matrices(stored: Mapping[str, StoredWeight]) -> dict[Hashable, StoredWeight]:
    """The smallest matrix of each kind; of those that are equal the one whose name comes first: of the first layer."""
    kinds: dict[Hashable, StoredWeight] = {}
    matrices = (weight for _, weight in sorted(stored.items()) if weight.shape is None or len(weight.shape) == 2)
    for weight in matrices:
        smallest = kinds.setdefault(weight.kind, weight)
        if weight.nbytes < smallest.nbytes:
            kinds[weight.kind] = weight
    return kinds
