"""The tensors of one linear layer, read by name, with type and shape checked.

The checkpoint is untrusted: no value is read before its tensor's type and shape are checked.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from quant.errors import DAMAGED, ModelFileError

SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class LayerTensors:
    """The tensors of `layer`, keyed by their names in it: "qweight", "weight.absmax".

    Names in `unused` belong to the layer but not to its weight, and are ignored.
    """

    def __init__(self, layer: str, tensors: Mapping[str, Tensor], *, unused: Collection[str] = ("bias",)) -> None:
        self.layer = layer
        self._tensors = tensors
        self._unused = unused
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, types: Collection[torch.dtype], *shape: int | None) -> Tensor:
        """Return tensor `name`, whose type must be one of `types`. In `shape`, None is any size except zero.

        Raises ModelFileError if the tensor is missing, or has another type or shape.
        """
        if name not in self._tensors:
            raise self.damaged(name, "is missing")
        tensor = self._tensors[name]
        self._taken.add(name)
        if tensor.dtype not in types:
            raise self.damaged(name, f"is of type {_name(tensor.dtype)}, not {' or '.join(map(_name, types))}")
        found = tuple(tensor.shape)
        fits = len(found) == len(shape) and all(
            size > 0 and wanted in (size, None) for size, wanted in zip(found, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("n" if size is None else str(size) for size in shape)
            raise self.damaged(name, f"has shape {list(found)}, not [{wanted}]")
        return tensor

    def finish(self) -> None:
        """Raise ModelFileError if a tensor was not read, because the layer is then not in the format that config.json
        names.
        """
        unknown = sorted(self._tensors.keys() - self._taken - set(self._unused))
        if unknown:
            raise self.damaged(unknown[0], "does not belong to a layer of this format")

    def damaged(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"The tensor {self.layer}.{name} {problem}", DAMAGED)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
