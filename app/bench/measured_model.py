"""What a benchmark has to know of the model file that everyone runs: read from its header, by no engine."""

from dataclasses import dataclass
from pathlib import Path

from app.models.stored_model import StoredModel
from quant.errors import ModelFileError
from quant.gguf_parts import GGUFParts

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model file, by its numbers."""

    stored: StoredModel
    vocab_size: int
    context_length: int  # tokens it was made for; 0: the file does not say
    weight_bytes: int  # read in a step that decodes one token

    @property
    def path(self) -> Path:
        return self.stored.path.absolute()


def read_model(stored: StoredModel) -> MeasuredModel:
    """Raises ModelFileError."""
    with GGUFParts(stored.path) as file:
        if _EMBEDDING not in file.tensors:
            raise ModelFileError(f"{stored.path} has no {_EMBEDDING}", "Try another file of this model.")
        vocab_size = file.tensors[_EMBEDDING].shape[0]
        context = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
        length = context if isinstance(context, int) else 0
        return MeasuredModel(stored, vocab_size, length, weight_bytes(file))


def weight_bytes(file: GGUFParts) -> int:
    """Bytes of all tensors, as the files have them. Of an embedding that is not the head too, a step reads one row."""
    total = sum(tensor.nbytes for tensor in file.tensors.values())
    if _HEAD in file.tensors:
        embedding = file.tensors[_EMBEDDING]
        total -= embedding.nbytes - embedding.nbytes // embedding.shape[0]
    return total
