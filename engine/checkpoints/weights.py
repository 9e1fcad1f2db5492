"""The weights of a checkpoint, taken by name and shape. After loading, a check ensures that all of them were taken."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, local
from typing import TypeVar

from torch import Tensor

from engine.checkpoints.checkpoint import StoredWeight, stored_bytes
from engine.errors import UnsupportedModel
from engine.load_options import UNCONTROLLED, LoadControl
from quant.errors import ModelFileError
from quant.kernels.reference import dequantize
from quant.tensor import PlainTensor, QTensor

MAX_LOADING_THREADS = 4  # more threads would be limited by memory bandwidth

# (bytes read so far, total bytes); called from any thread, one call at a time
LoadProgress = Callable[[int, int], None]

POLL_SECONDS = 0.05  # interval at which a waiting thread finds out whether it may continue

Item = TypeVar("Item")
Made = TypeVar("Made")


class _LoadingTurn:
    """Lets all loading threads run, or only one of them while other engines of the process compute."""

    def __init__(self, control: LoadControl) -> None:
        self._control = control
        self._lock = Lock()
        self._mine = local()

    def run(self, load: Callable[[Item], Made], item: Item) -> Made:
        """Return load(item), which calls `wait` before each tensor."""
        self._mine.is_held = False
        try:
            return load(item)
        finally:
            self._release()
            del self._mine.is_held

    def wait(self) -> None:
        """Wait until the calling thread may continue. Raises LoadStopped. Only threads inside `run` wait."""
        self._control.check()
        while not getattr(self._mine, "is_held", True) and self._control.is_busy():
            self._mine.is_held = self._lock.acquire(timeout=POLL_SECONDS)
            self._control.check()
        if not self._control.is_busy():
            self._release()

    def _release(self) -> None:
        if getattr(self._mine, "is_held", False):
            self._mine.is_held = False
            self._lock.release()


class Weights:
    """The weights of an open checkpoint, each of which can be taken once.

    Decoding copies a weight, so the checkpoint may be closed after loading. Only the weights being decoded are in
    memory.
    """

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, StoredWeight],
        progress: LoadProgress | None = None,
        threads: int = 1,
        control: LoadControl = UNCONTROLLED,
    ) -> None:
        self._path = path
        self._stored = stored
        self._left = set(stored)
        self._total = stored_bytes(stored)
        self._done = 0
        self._progress = progress
        self._threads = min(threads, MAX_LOADING_THREADS)
        self._turn = _LoadingTurn(control)
        self._lock = Lock()
        self._cancelled = False

    def matrix_samples(self) -> list[QTensor]:
        """Return a small matrix of every distinct layout among the layers."""
        return matrix_samples(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> QTensor:
        """Return a weight in canonical form.

        Raises ModelFileError if it is missing or does not have `shape` (row-major), or LoadStopped.
        """
        if self._cancelled:
            raise CancelledError
        self._turn.wait()
        if name not in self._left:
            raise ModelFileError(f"{self._path} has no tensor {name}", "The file is incomplete: pull it again.")
        self._left.discard(name)
        stored = self._stored[name]
        if stored.shape is not None:
            self._check_shape(stored.name, stored.shape, shape)
        weight = stored.decode()
        self._check_shape(stored.name, weight.shape, shape)
        with self._lock:
            self._done += stored.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        return weight

    def _check_shape(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise ModelFileError(f"{self._path}: {name} has shape {shape}, but the model needs {wanted}")

    def drop(self, name: str) -> None:
        """Skip a weight that the configuration does not use."""
        self._left.discard(name)

    def take_vector(self, name: str, length: int) -> Tensor:
        """Return a one-dimensional tensor as float32 [length]."""
        return dequantize(self.take(name, length))

    def take_row(self, name: str, width: int) -> QTensor:
        """Return a vector, or a matrix of one row, as a matrix [1, width]."""
        stored = self._stored.get(name)
        if stored is None or stored.shape != (width,):
            return self.take(name, 1, width)
        vector = dequantize(self.take(name, width))
        return PlainTensor((1, width), "F32", vector.view(1, width))

    def rows(self, weight: QTensor, index: Tensor) -> QTensor:
        """Return the rows `index` (int64 [n]) of a matrix that was taken."""
        return weight.rows(index)

    def take_convolution(self, name: str, channels: int, taps: int) -> Tensor:
        """Return the weights of a convolution of each channel as float32 [channels, taps].

        transformers stores them as [channels, 1, taps].
        """
        stored, shape = self._stored.get(name), (channels, 1, taps)
        weight = self.take(name, *(shape if stored is not None and stored.shape == shape else (channels, taps)))
        return dequantize(weight).view(channels, taps)

    def load_parallel(self, load: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        """Return load(item) for each item, computed by a thread pool.

        Its threads have the usual priority: one of low priority that holds the GIL and waits for a core would hold up
        all others.

        Raises the error of the first item that fails. In that case, and when the caller is interrupted, the other
        threads stop after their current tensor.
        """
        with ThreadPoolExecutor(self._threads, "loading") as pool:
            try:
                # not pool.map: an error would reference its iterator, and so all results
                loading = [pool.submit(self._turn.run, load, item) for item in items]
                return [one.result() for one in loading]
            except BaseException:
                self._cancelled = True
                pool.shutdown(cancel_futures=True)
                raise

    def finish(self) -> None:
        """Check that all weights were taken.

        Raises UnsupportedModel if tensors are left over, because the model would compute something else without them.
        """
        if self._progress and self._done < self._total:  # some tensors of the file are not used by the model
            self._progress(self._total, self._total)
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(
                f"{self._path} has tensors this version does not use: {', '.join(names[:5])}{more}",
                "The model is a variant that is not supported yet.",
            )


def matrix_samples(stored: Mapping[str, StoredWeight]) -> list[QTensor]:
    """Return a small matrix of every distinct layout among the weights."""
    return [weight.sample() for weight in smallest_matrices(stored).values()]


def smallest_matrices(stored: Mapping[str, StoredWeight]) -> dict[Hashable, StoredWeight]:
    """Return the smallest matrix of each kind. Among equal sizes, the first name wins, which is in the first layer."""
    kinds: dict[Hashable, StoredWeight] = {}
    matrices = (weight for _, weight in sorted(stored.items()) if weight.shape is None or len(weight.shape) == 2)
    for weight in matrices:
        smallest = kinds.setdefault(weight.kind, weight)
        if weight.nbytes < smallest.nbytes:
            kinds[weight.kind] = weight
    return kinds
