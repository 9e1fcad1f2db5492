"""The first layers of a model in a GGUF file, with its whole vocabulary: real weights at a fraction of the cost.

What it says means little, but each token still depends on all before it. No tokenizer is written.
"""

from pathlib import Path

import gguf

from tests.gguf_reader import Reader

KEYS = (
    "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "vocab_size",
)  # fmt: skip


def write_first_layers(whole: Path, path: Path, count: int) -> None:
    """`path`: a file with the first `count` layers of the Llama in the file `whole`, bit for bit."""
    reader, writer = Reader(whole), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(count)
    for key in (f"llama.{name}" for name in KEYS):
        field = reader.fields[key]
        writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        first, _, rest = tensor.name.partition(".")
        if first != "blk" or int(rest.partition(".")[0]) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
