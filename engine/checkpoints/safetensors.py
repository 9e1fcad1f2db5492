"""A folder of safetensors files with a config.json, as a checkpoint.

A family's `Names` maps tensor names to GGUF names. The tensors of one layer are decoded together, because a quantized
weight consists of several tensors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from engine.checkpoints.checkpoint import Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from quant.checkpoint_files import as_object, read_bytes
from quant.errors import ModelFileError
from quant.layer_format import NOT_QUANTIZED, UNUSED_TENSORS, LayerNames, is_quantized, read_format
from quant.mapped_file import Closing
from quant.safetensors import SafetensorsTensor
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import TORCH_TYPES, decode_plain
from quant.tensor import PlainTensor, QTensor

CONFIG = "config.json"
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
        stems = {theirs: ours for ours, theirs in names.stems.items()}
        layers: dict[str, dict[str, str]] = defaultdict(dict)  # GGUF stem -> tensor names of the layer
        stored: dict[str, StoredWeight] = {}
        for name, tensor in self._shards.tensors.items():
            if names.ignored.fullmatch(name):
                continue
            if found := _find(name.replace(names.prefix, "") if names.prefix else name, stems):
                layers[found.stem][found.rest] = name
            else:
                stored[name] = self._plain(tensor)
        for stem, tensors in layers.items():
            stored |= self._layer(stem, tensors)
        return stored

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

    def _plain(self, tensor: SafetensorsTensor) -> StoredWeight:
        def decode() -> PlainTensor:
            weight = decode_plain(tensor, self._shards.data(tensor.name))
            self._shards.release(tensor.name)
            return weight

        sample = partial(_sample, tensor.type.name)
        return StoredWeight(tensor.name, tensor.nbytes, tensor.type.name, decode, sample, tensor.shape)

    def close(self) -> None:
        self._shards.close()


@dataclass(frozen=True, slots=True)
class _Found:
    stem: str  # GGUF name with the layer number
    rest: str  # the rest of the tensor's name, after the layer


def _find(name: str, stems: Mapping[str, str]) -> _Found | None:
    """Return the layer that a tensor belongs to. The first numeric component of the name is the layer number."""
    parts = name.split(".")
    number = next((part for part in parts if part.isdecimal()), "")
    general = ["{}" if part == number and number else part for part in parts]
    for length in range(len(parts) - 1, 0, -1):
        stem = stems.get(".".join(general[:length]))
        if stem is not None:
            return _Found(stem.replace("{}", number), ".".join(parts[length:]))
    return None


def _sample(type_name: str) -> PlainTensor:
    values = torch.zeros(SAMPLE_SHAPE, dtype=TORCH_TYPES[type_name])
    return PlainTensor(SAMPLE_SHAPE, type_name, values)
