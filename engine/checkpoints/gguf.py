"""A GGUF file, or all parts of a split one, as a checkpoint: metadata, and tensors that are decoded when they are
taken.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gguf.constants import Keys

from engine.checkpoints.checkpoint import MAX_EXPERTS, Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from quant.ggml_blocks import decode, decode_read
from quant.ggml_types import GGMLType
from quant.gguf import GGUFTensor
from quant.gguf_parts import GGUFParts
from quant.tensor import BlockTensor
from quant.tensor_file import WHOLE, Closing, Slab

# a tensor of all experts of a layer; its matrices get the names of older files, such as blk.3.ffn_up.7.weight
_STACKED = re.compile(r"(?P<layer>blk\.\d+\.ffn_\w+)_exps\.(?P<kind>weight|bias)")
SAMPLE_ROWS = 2  # at least 2, because a single row would be the whole matrix
SAMPLE_COLUMNS = 128  # columns of a sample unless a block is larger; a multiple of any group that shares a scale


class GGUFCheckpoint(Closing):
    """Implements `engine.checkpoints.checkpoint.Checkpoint`.

    Raises ModelFileError, or UnsupportedModel if the file does not name its architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = GGUFParts(path)
        self.digest = self._parts.header_digest
        architecture = self._parts.metadata.get(Keys.General.ARCHITECTURE)
        if not isinstance(architecture, str):
            self.close()
            raise UnsupportedModel(f"{path} does not name its architecture (general.architecture)")
        self.metadata = Metadata(self._parts.metadata, architecture)

    def weights(self, names: Names) -> Mapping[str, StoredWeight]:
        stored: dict[str, StoredWeight] = {}
        for tensor in self._parts.tensors.values():
            if names.ignored.fullmatch(tensor.name):
                continue
            stacked = _STACKED.fullmatch(tensor.name)
            if stacked and len(tensor.shape) > 1 and tensor.shape[0] <= MAX_EXPERTS:
                count = tensor.shape[0]
                for expert in range(count):
                    name = f"{stacked['layer']}.{expert}.{stacked['kind']}"
                    stored[name] = self._stored(tensor, tensor.shape[1:], Slab(expert, count))
            else:
                stored[tensor.name] = self._stored(tensor, tensor.shape, WHOLE)
        return stored

    def _stored(self, tensor: GGUFTensor, shape: tuple[int, ...], slab: Slab) -> StoredWeight:
        return StoredWeight(
            tensor.name,
            tensor.nbytes // slab.count,
            tensor.type,
            partial(self._decode, tensor, shape, slab),
            partial(_sample, tensor.type),
            shape,
        )

    def _decode(self, tensor: GGUFTensor, shape: tuple[int, ...], slab: Slab) -> BlockTensor:
        return decode_read(tensor.type, partial(self._parts.read, tensor.name, slab), shape)

    def close(self) -> None:
        self._parts.close()


def _sample(kind: GGMLType) -> BlockTensor:
    columns = max(SAMPLE_COLUMNS, kind.block_elements)
    return decode(kind, memoryview(bytes(kind.nbytes(SAMPLE_ROWS * columns))), (SAMPLE_ROWS, columns))
