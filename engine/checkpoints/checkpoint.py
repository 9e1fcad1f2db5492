"""The interface of an open checkpoint: its metadata, and its weights, each decoded when it is taken.

Weights have the names of GGUF, such as `blk.3.attn_q.weight`. A family's `Names` maps them to those of transformers.
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


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of a checkpoint that is not decoded yet."""

    name: str  # as the file has it
    nbytes: int  # of the file
    kind: Hashable  # weights of one kind have one layout once they are read
    decode: Callable[[], "QTensor"]  # copies, and gives back the memory that the file's bytes took
    sample: Callable[[], "QTensor"]  # a small matrix of the same layout, its values of no meaning
    shape: tuple[int, ...] | None = None  # row-major; None: not known before it is decoded


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's weights in checkpoints of transformers."""

    stems: Mapping[str, str]  # from ours, without `.weight` or `.bias`; {} stands for a layer's number
    ignored: re.Pattern[str] = field(default=NOTHING)  # tensors that the decoder does not need
    prefix: str = ""  # left out of names, wherever it stands in them


class Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def digest(self) -> str:
        """Over everything but the values of weights, in hex."""
        ...

    @property
    def metadata(self) -> Metadata: ...

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        """All of them, by our names; one that `names` does not know keeps its own.

        Raises ModelFileError or UnsupportedQuantization.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
