"""Write a wider copy of a Llama GGUF file that computes the same logits, up to rounding.

All new weights are zero: rows and columns of matrices are padded, and each key and value head is repeated for its query
heads. The blocks of the original are kept bit for bit. The copy takes the memory and time of a larger model, and
nearly always agrees with the original about the next token.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

HEAD_DIM = 64


@dataclass(frozen=True)
class Width:
    """The widths of the copy. `hidden` is `heads` times HEAD_DIM."""

    heads: int
    mlp_hidden: int

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM


WIDE = Width(heads=32, mlp_hidden=6144)  # with the 30 layers of SmolLM2 135M: 1.7 billion weights


def write_widened(source: Path, target: Path, width: Width = WIDE) -> None:
    """Write the copy of `source`, a Llama with heads of HEAD_DIM values, to `target`."""
    reader = gguf.GGUFReader(source)
    values = {key: field.contents() for key, field in reader.fields.items()}
    hidden = int(values["llama.embedding_length"])
    queries = int(values["llama.attention.head_count"]) // int(values["llama.attention.head_count_kv"])
    shrink = hidden / width.hidden  # the mean square of a padded row is smaller by this factor
    writer = gguf.GGUFWriter(target, "llama")
    changed = {
        "llama.embedding_length": width.hidden,
        "llama.feed_forward_length": width.mlp_hidden,
        "llama.attention.head_count": width.heads,
        "llama.attention.head_count_kv": width.heads,
        "llama.attention.layer_norm_rms_epsilon": values["llama.attention.layer_norm_rms_epsilon"] * shrink,
    }
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, changed.get(key, values[key]), field.types[0], element)
    for tensor in reader.tensors:
        data = _widened(tensor, width, queries, shrink)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _widened(tensor: gguf.ReaderTensor, width: Width, queries: int, shrink: float) -> NDArray[np.generic]:
    data = np.asarray(tensor.data)
    if data.ndim == 1:  # the weights of a norm
        return np.pad(data * np.float32(shrink**0.5), (0, width.hidden - data.size))
    kind, columns = tensor.name.split(".")[-2], int(tensor.shape[0])
    rows = {"token_embd": data.shape[0], "ffn_gate": width.mlp_hidden, "ffn_up": width.mlp_hidden}
    if kind in ("attn_k", "attn_v"):
        heads = data.reshape(-1, HEAD_DIM, data.shape[-1])
        data = np.repeat(heads, queries, axis=0).reshape(-1, data.shape[-1])
    wide = width.mlp_hidden if kind == "ffn_down" else width.hidden
    row_bytes = data.shape[-1] * wide // columns
    return np.pad(data, ((0, rows.get(kind, width.hidden) - data.shape[0]), (0, row_bytes - data.shape[-1])))
