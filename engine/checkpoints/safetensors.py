"""A folder of safetensors files with a config.json, as a checkpoint.

A family's `Names` maps tensor names to GGUF names. The tensors of one layer are decoded together, because a quantized
weight consists of several tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from engine.checkpoints.checkpoint import MAX_EXPERTS, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from quant import mxfp4
from quant.checkpoint_files import as_object, read_bytes
from quant.errors import DAMAGED, ModelFileError
from quant.layer_format import NOT_QUANTIZED, UNUSED_TENSORS, LayerNames, is_quantized, read_format
from quant.safetensors import SafetensorsTensor
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import PLAIN_TYPES, TORCH_TYPES, decode_plain, values
from quant.tensor import PlainTensor, QTensor
from quant.tensor_file import WHOLE, Closing, Slab

CONFIG = "config.json"
MXFP4_TENSORS = {"blocks", "scales"}  # names of the parts of MXFP4 matrices
SCALE = "scale"  # name of a vector that is no part of a quantized matrix
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
        config = as_object(raw, folder / CONFIG)
        architecture = config.get("model_type")
        if not isinstance(architecture, str):
            raise UnsupportedModel(f"{folder / CONFIG} does not name its architecture (model_type)")
        self.metadata = Metadata(config, architecture, is_config=True)
        section = config.get("quantization_config")
        self._format = NOT_QUANTIZED if section is None else read_format(section)
        self._shards = SafetensorsShards(folder)
        self.digest = sha256(raw + self._shards.header_digest.encode()).hexdigest()

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        known = _KnownNames(names)
        layers: dict[str, dict[str, str]] = defaultdict(dict)  # GGUF stem -> tensor names of the layer
        experts: dict[str, dict[str, SafetensorsTensor]] = defaultdict(dict)  # GGUF stem -> tensors of all experts
        stored: dict[str, StoredWeight] = {}
        for name, tensor in self._shards.tensors.items():
            if names.ignored.fullmatch(name):
                continue
            found = known.find(name)
            if found is None:
                stored[name] = self._plain(tensor)
            elif found.rest == SCALE:
                stored[f"{found.stem}.{SCALE}"] = self._plain(tensor)
            elif EXPERT in found.stem:
                experts[found.stem][found.rest] = tensor
            else:
                layers[found.stem][found.rest] = name
        for stem, tensors in layers.items():
            stored |= self._layer(stem, tensors)
        for stem, stacked in experts.items():
            stored |= self._experts(stem, stacked, are_transposed=names.transposed)
        return stored

    def _experts(
        self, stem: str, tensors: Mapping[str, SafetensorsTensor], *, are_transposed: bool
    ) -> dict[str, StoredWeight]:
        """Return the matrices and biases of tensors that stack those of all experts of a layer."""
        stored, floats = dict[str, StoredWeight](), dict(tensors)
        if floats.keys() >= MXFP4_TENSORS:
            stored = self._mxfp4_experts(f"{stem}.weight", floats.pop("blocks"), floats.pop("scales"))
        for rest, tensor in floats.items():
            is_matrix = rest != "bias"
            count = _number_of_experts(tensor, PLAIN_TYPES, dimensions=3 if is_matrix else 2)
            for expert, name in _expert_names(f"{stem}.{rest}", count):
                stored[name] = self._plain(tensor, Slab(expert, count), transposed=are_transposed and is_matrix)
        return stored

    def _mxfp4_experts(
        self, name: str, blocks: SafetensorsTensor, scales: SafetensorsTensor
    ) -> dict[str, StoredWeight]:
        """Return the matrices of experts from the tensors that stack their codes and their scales."""
        count = _number_of_experts(blocks, ("U8",), dimensions=4)
        _, rows, groups, size = blocks.shape
        if scales.type.name != "U8" or scales.shape != blocks.shape[:-1] or size != mxfp4.GROUP // 2:
            raise ModelFileError(
                f"{blocks.name} has shape {blocks.shape}, which does not match {scales.name} {scales.shape}", DAMAGED
            )

        def decode(slab: Slab) -> QTensor:
            parts = (replace(it, shape=it.shape[1:]) for it in (blocks, scales))
            return mxfp4.decode(*(values(part, self._shards.data(part.name, slab)) for part in parts))

        nbytes = (blocks.nbytes + scales.nbytes) // count
        return {
            own: StoredWeight(
                blocks.name, nbytes, mxfp4.MXFP4, partial(decode, Slab(expert, count)), mxfp4.sample,
                (rows, mxfp4.GROUP * groups),
            )
            for expert, own in _expert_names(name, count)
        }  # fmt: skip

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
        return self._format.decode(self._shards, layer, names)

    def _plain(self, tensor: SafetensorsTensor, slab: Slab = WHOLE, *, transposed: bool = False) -> StoredWeight:
        """Return a float tensor, or a part of one that stacks several. `transposed`: the tensor is that of a matrix."""
        part = tensor if slab is WHOLE else replace(tensor, shape=tensor.shape[1:], nbytes=tensor.nbytes // slab.count)
        shape = part.shape[::-1] if transposed else part.shape

        def decode() -> PlainTensor:
            weight = decode_plain(part, self._shards.data(tensor.name, slab))
            return PlainTensor(shape, weight.type_name, weight.values.T.contiguous()) if transposed else weight

        sample = partial(_sample, tensor.type.name)
        return StoredWeight(tensor.name, part.nbytes, tensor.type.name, decode, sample, shape)

    def close(self) -> None:
        self._shards.close()


def _number_of_experts(tensor: SafetensorsTensor, types: Sequence[str], *, dimensions: int) -> int:
    """Return the number of experts whose parts a tensor stacks. Raises UnsupportedModel if it has another form."""
    count = tensor.shape[0] if len(tensor.shape) == dimensions else 0
    if not 0 < count <= MAX_EXPERTS or tensor.type.name not in types:
        raise UnsupportedModel(
            f"{tensor.name} has type {tensor.type.name} and shape {tensor.shape}, which is not supported",
            f"It must have {dimensions} dimensions, at most {MAX_EXPERTS} experts, and type {', '.join(types)}.",
        )
    return count


def _expert_names(name: str, count: int) -> Iterator[tuple[int, str]]:
    """Return the number of each expert, and a name with that number."""
    return ((expert, name.replace(EXPERT, str(expert))) for expert in range(count))


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
    return PlainTensor(SAMPLE_SHAPE, type_name, torch.zeros(SAMPLE_SHAPE, dtype=TORCH_TYPES[type_name]))
