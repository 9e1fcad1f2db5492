"""Facts about the measured model, read from the header of its file."""

from dataclasses import dataclass
from pathlib import Path

from app.models.stored_model import StoredModel
from engine.checkpoints.checkpoint import LAYER_EMBEDDINGS
from quant.errors import ModelFileError
from quant.gguf_parts import GGUFParts

_EXPERTS = "_exps."  # part of the names of tensors with the weights of all experts
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model file and its sizes."""

    stored: StoredModel
    vocab_size: int
    context_length: int  # maximum context in tokens; 0: the file does not contain it
    weight_bytes: int  # number of bytes that a step reads to decode one token

    @property
    def path(self) -> Path:
        return self.stored.path.absolute()


def read_model(stored: StoredModel) -> MeasuredModel:
    """Read the header of a model file. Raises ModelFileError."""
    with GGUFParts(stored.path) as file:
        if _EMBEDDING not in file.tensors:
            raise ModelFileError(f"{stored.path} has no {_EMBEDDING}", "Try another file of this model.")
        vocab_size = file.tensors[_EMBEDDING].shape[0]
        length = _number(file, "context_length")
        return MeasuredModel(stored, vocab_size, length, weight_bytes(file))


def weight_bytes(file: GGUFParts) -> int:
    """Return the number of bytes that one decoding step reads: the size of all tensors as stored.

    A separate embedding counts as one row, because a step reads one row of it, as does a table of the embeddings of
    layers. Experts count if they compute the token.
    """
    used, count = _number(file, "expert_used_count"), max(1, _number(file, "expert_count"))
    total = sum(it.nbytes * used // count if _EXPERTS in name else it.nbytes for name, it in file.tensors.items())
    tables = [_EMBEDDING] * (_HEAD in file.tensors) + [LAYER_EMBEDDINGS] * (LAYER_EMBEDDINGS in file.tensors)
    for table in map(file.tensors.__getitem__, tables):
        total -= table.nbytes - table.nbytes // table.shape[0]
    return total


def _number(file: GGUFParts, key: str) -> int:
    """Return a number of the model's architecture; 0 if the file does not contain it."""
    value = file.metadata.get(f"{file.metadata.get('general.architecture')}.{key}")
    return value if isinstance(value, int) else 0
