"""A folder of safetensors files with a config.json, as a checkpoint.

A family's `Names` maps tensor names to GGUF names. The tensors of one layer are decoded together, because a quantized
weight consists of several tensors.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from engine.checkpoints.checkpoint import MAX_EXPERTS, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from quant.checkpoint_files import as_object, read_bytes
from quant.errors import ModelFileError
from quant.layer_format import NOT_QUANTIZED, UNUSED_TENSORS, LayerNames, is_quantized, read_format
from quant.mapped_file import WHOLE, Closing, Slab
from quant.safetensors import SafetensorsTensor
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import PLAIN_TYPES, TORCH_TYPES, decode_plain
from quant.tensor import PlainTensor, QTensor

CONFIG = "config.json"
EXPERT = "{e}"  # placeholder for the number of an expert (see `Names`)
# (rows, columns): at least two rows, because a single row would be the whole matrix; columns that are a multiple of any
# quantization group
SAMPLE_SHAPE = (2, 128)


class SafetensorsCheckpoint(Closing):
    """Implements `engine.checkpoints.checkpoint.Checkpoint`.

    Raises ModelFileError if a file is missing or malformed, UnsupportedQuantization, or UnsupportedModel.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        raw = read_bytes(folder, CONFIG)
        if raw is None:
            raise ModelFileError(f"{folder} has no {CONFIG}", "Give the folder of a complete checkpoint.")
        values = as_object(raw, folder / CONFIG)
        architecture = values.get("model_type")
        if not isinstance(architecture, str):
            raise UnsupportedModel(f"{folder / CONFIG} does not name its architecture (model_type)")
        self.metadata = Metadata(values, architecture, is_config=True)
        section = values.get("quantization_config")
        self._format = NOT_QUANTIZED if section is None else read_format(section)
        self._shards = SafetensorsShards(folder)
        self.digest = sha256(raw + self._shards.header_digest.encode()).hexdigest()

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        known = _KnownNames(names)
        layers: dict[str, dict[str, str]] = defaultdict(dict)  # GGUF stem -> tensor names of the layer
        stored: dict[str, StoredWeight] = {}
        for name, tensor in self._shards.tensors.items():
            if names.ignored.fullmatch(name):
                continue
            found = known.find(name)
            if found is None:
                stored[name] = self._plain(tensor)
            elif EXPERT in found.stem:
                stored |= self._experts(f"{found.stem}.{found.rest}", tensor)
            else:
                layers[found.stem][found.rest] = name
        for stem, tensors in layers.items():
            stored |= self._layer(stem, tensors)
        return stored

    def _experts(self, name: str, tensor: SafetensorsTensor) -> dict[str, StoredWeight]:
        """Return the matrices of a tensor that stacks those of all experts of a layer."""
        count = tensor.shape[0] if len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS else 0
        if not count or tensor.type.name not in PLAIN_TYPES:
            raise UnsupportedModel(
                f"{tensor.name} has type {tensor.type.name} and shape {tensor.shape}, which is not supported",
                f"It must have 3 dimensions, at most {MAX_EXPERTS} experts, and type {', '.join(PLAIN_TYPES)}.",
            )
        return {name.replace(EXPERT, str(expert)): self._plain(tensor, Slab(expert, count)) for expert in range(count)}

    def _layer(self, stem: str, names: LayerNames) -> dict[str, StoredWeight]:
        """Return the weight and the bias of one layer."""
        tensors = {rest: self._shards.tensors[name] for rest, name in names.items()}
        if not is_quantized(tensors):
            return {f"{stem}.{rest}": self._plain(tensor) for rest, tensor in tensors.items()}
        stored = {f"{stem}.bias": self._plain(tensors["bias"])} if "bias" in tensors else {}
        parts = {rest: name for rest, name in names.items() if rest not in UNUSED_TENSORS}
        name = min(parts.values())
        layer = name.removesuffix(f".{next(rest for rest, whole in parts.items() if whole == name)}")
        decode = partial(self._decode, layer, parts)
        types = sorted((rest, tensors[rest].type.name, len(tensors[rest].shape)) for rest in parts)
        kind = (self._format.scheme(layer), *types)
        stored[f"{stem}.weight"] = StoredWeight(
            layer, sum(tensors[rest].nbytes for rest in parts), kind, decode, decode
        )
        return stored

    def _decode(self, layer: str, names: LayerNames) -> QTensor:
        weight = self._format.decode(self._shards, layer, names)
        for name in names.values():
            self._shards.release(name)
        return weight

    def _plain(self, tensor: SafetensorsTensor, slab: Slab = WHOLE) -> StoredWeight:
        part = tensor if slab is WHOLE else replace(tensor, shape=tensor.shape[1:], nbytes=tensor.nbytes // slab.count)

        def decode() -> PlainTensor:
            weight = decode_plain(part, self._shards.data(tensor.name, slab))
            self._shards.release(tensor.name, slab)
            return weight

        sample = partial(_sample, tensor.type.name)
        return StoredWeight(tensor.name, part.nbytes, tensor.type.name, decode, sample, part.shape)

    def close(self) -> None:
        self._shards.close()


@dataclass(frozen=True, slots=True)
class _Found:
    stem: str  # GGUF name with the layer number, and with that of the expert unless the tensor stacks all experts
    rest: str  # the rest of the tensor's name, after the layer


class _KnownNames:
    """Finds the layer that a tensor belongs to."""

    def __init__(self, names: Names) -> None:
        self._prefix = names.prefix
        self._stems = {theirs: ours for ours, theirs in names.stems.items()}
        self._whole = names.whole

    def find(self, name: str) -> _Found | None:
        """Return the layer of a tensor. The first number in its name is the layer's, and the second the expert's."""
        parts = (name.replace(self._prefix, "") if self._prefix else name).split(".")
        numbers = [part for part in parts if part.isdecimal()]
        general = _with_placeholders(parts)
        if ours := self._whole.get(".".join(general)):
            stem, _, rest = _numbered(ours, numbers).rpartition(".")
            return _Found(stem, rest)
        for length in range(len(parts) - 1, 0, -1):
            if known := self._stems.get(".".join(general[:length])):
                return _Found(_numbered(known, numbers), ".".join(parts[length:]))
        return None


def _with_placeholders(parts: Sequence[str]) -> list[str]:
    """Return the parts of a name with placeholders for the first two numbers."""
    placeholders = iter(("{}", EXPERT))
    return [next(placeholders, part) if part.isdecimal() else part for part in parts]


def _numbered(name: str, numbers: Sequence[str]) -> str:
    """Fill the placeholders of a name."""
    for placeholder, number in zip(("{}", EXPERT), numbers, strict=False):
        name = name.replace(placeholder, number)
    return name


def _sample(type_name: str) -> PlainTensor:
    values = torch.zeros(SAMPLE_SHAPE, dtype=TORCH_TYPES[type_name])
    return PlainTensor(SAMPLE_SHAPE, type_name, values)
