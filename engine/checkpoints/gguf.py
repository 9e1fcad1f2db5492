"""A GGUF file, or all parts of a split one, as a checkpoint: metadata, and tensors that are decoded when they are
taken.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names, StoredWeight
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from quant.ggml_blocks import decode
from quant.ggml_types import GGMLType
from quant.gguf import GGUFTensor
from quant.gguf_parts import GGUFParts
from quant.mapped_file import Closing
from quant.tensor import BlockTensor

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
        return {
            tensor.name: StoredWeight(
                tensor.name,
                tensor.nbytes,
                tensor.type,
                partial(self._decode, tensor),
                partial(_sample, tensor.type),
                tensor.shape,
            )
            for tensor in self._parts.tensors.values()
        }

    def _decode(self, tensor: GGUFTensor) -> BlockTensor:
        weight = decode(tensor.type, self._parts.data(tensor.name), tensor.shape)
        self._parts.release(tensor.name)
        return weight

    def close(self) -> None:
        self._parts.close()


def _sample(kind: GGMLType) -> BlockTensor:
    columns = max(SAMPLE_COLUMNS, kind.block_elements)
    return decode(kind, memoryview(bytes(kind.nbytes(SAMPLE_ROWS * columns))), (SAMPLE_ROWS, columns))
