"""The interface of an open checkpoint: its metadata, and weights that are decoded when they are taken.

Weights have their GGUF names, such as `blk.3.attn_q.weight`. A family's `Names` maps them to the names in transformers.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from engine.checkpoints.metadata import Metadata

if TYPE_CHECKING:
    from quant.tensor import QTensor

NOTHING = re.compile(r"(?!)")
LAYER_EMBEDDINGS = "per_layer_token_embd.weight"
HOST_WEIGHTS = frozenset({LAYER_EMBEDDINGS})  # weights that stay in the host's memory on every device
MAX_EXPERTS = 4096  # limit of the matrices that a tensor of experts is divided into


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor in a checkpoint that has not been decoded yet."""

    name: str  # the tensor's name in the file
    nbytes: int  # the tensor's size in the file
    kind: Hashable  # weights of the same kind have the same layout after loading
    decode: Callable[[], "QTensor"]  # reads and copies the tensor
    sample: Callable[[], "QTensor"]  # returns a small matrix of the same layout with arbitrary values
    shape: tuple[int, ...] | None = None  # row-major; None: unknown before decoding


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's weights in transformers checkpoints.

    In names, {} is a layer number and {e} the number of an expert. If only the GGUF name has {e}, the tensor stacks the
    matrices of all experts of a layer.
    """

    stems: Mapping[str, str]  # GGUF name without `.weight` or `.bias` -> name in transformers without it
    # matches tensors that the decoder does not need, by their names in transformers checkpoints and in GGUF files
    ignored: re.Pattern[str] = field(default=NOTHING)
    prefix: str = ""  # removed from tensor names, at any position
    # whole name in transformers -> whole GGUF name, for tensors without `.weight` or `.bias`, and for other spellings
    whole: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False  # whether float tensors that stack matrices stack the transposed ones; not in GGUF files


def stored_bytes(stored: Mapping[str, StoredWeight]) -> int:
    """Return the size of weights in their files."""
    return sum(weight.nbytes for weight in stored.values())


def host_weight_bytes(stored: Mapping[str, StoredWeight]) -> int:
    """Return the size of the weights that stay in the host's memory on every device, in their files."""
    return sum(weight.nbytes for name, weight in stored.items() if name in HOST_WEIGHTS)


class Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def digest(self) -> str:
        """Hex digest of everything in the checkpoint except the values of weights."""
        ...

    @property
    def metadata(self) -> Metadata: ...

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        """Return all weights by GGUF name. A tensor that `names` does not list keeps its own name.

        Raises ModelFileError or UnsupportedQuantization.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
