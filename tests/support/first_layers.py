"""Write the first layers of a model to a GGUF file, with its vocabulary: real weights at a fraction of the cost.

The output of this model has little meaning, but each token still depends on all earlier tokens.
"""

from pathlib import Path

import gguf

from tests.support.gguf_reader import Reader


def write_first_layers(
    reader: Reader, path: Path, count: int, *, tokenizer: bool = False, most_tensors: int = 0
) -> None:
    """Write the first `count` layers of a Llama, bit for bit, and its metadata. The tokenizer is optional.

    `most_tensors` is the maximum number of tensors per file. It splits the model into several files beside `path`.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=most_tensors)
    left_out = ("GGUF.", "general.architecture", *(() if tokenizer else ("tokenizer.",)))
    for field in reader.fields.values():
        if not field.name.startswith(left_out):
            item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            value = count if field.name == "llama.block_count" else field.contents()
            writer.add_key_value(field.name, value, field.types[0], item)
    for tensor in reader.tensors:
        first, _, rest = tensor.name.partition(".")
        if first != "blk" or int(rest.partition(".")[0]) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
