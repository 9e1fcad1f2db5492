"""Convert a folder to a float32 GGUF file with llama.cpp's own converter.

    python -P llama_cpp_convert.py LLAMA_CPP FOLDER FILE

LLAMA_CPP is the source of llama.cpp, such as `vendor/llama.cpp` in the source distribution of llama-cpp-python. The
tokenizer is replaced by one of numbered tokens, because the converter refuses tokenizers that it does not know. The
file imports only the converter, whose `gguf` is not that of the package index.
"""

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    source, folder, file = map(Path, sys.argv[1:])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    conversion: Any = importlib.import_module("conversion")
    model_class = conversion.get_model_class
    config = json.loads((folder / "config.json").read_text())
    vocabulary = config["vocab_size"]
    tokens = {f"token{number}": number for number in range(vocabulary)}  # Gemma's converter counts them in a file
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))

    def set_vocab(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("gpt2")
        model.gguf_writer.add_tokenizer_pre("default")
        model.gguf_writer.add_token_list(list(tokens))
        model.gguf_writer.add_token_types([1] * vocabulary)
        model.gguf_writer.add_token_merges(["t o"])

    def with_numbered_tokens(*arguments: Any, **options: Any) -> Any:
        found = model_class(*arguments, **options)
        found.set_vocab = set_vocab
        return found

    conversion.get_model_class = with_numbered_tokens
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(file), "--outtype", "f32"]
    if config["model_type"].startswith(("qwen3_5", "qwen3_next")):  # the tiny models have no layers that draft tokens
        sys.argv.append("--no-mtp")
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
