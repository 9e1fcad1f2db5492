"""Measure how much quality quantization loses: `python -m tests.bench.perplexity MODEL.gguf --text FILE`, for
SmolLM2-135M-Instruct.

The baseline is the file's weights as float32. It is compared with a bfloat16 checkpoint of these weights, and with that
checkpoint after `ingle quantize` with each method. Inglenook's decoders read the weights from the files, and
transformers always computes in float32.

The text has 4,096 tokens, in windows of 1,024. It starts at the 20,000th character of FILE, which is inside a chapter
of the book below. Without --text, it is Python's help() topics. This package has a book in the public domain:

    pip download --no-deps --no-binary :all: Brotli==1.2.1 && tar xf brotli-1.2.1.tar.gz
    python -m tests.bench.perplexity MODEL.gguf --text brotli-1.2.1/tests/testdata/alice29.txt

The report lists, for each method: the perplexity; its relative increase over float32; the mean loss of log-likelihood
per token, and its standard error; bits per weight of the linear layers; and million weights read, quantized, and
written per second.
"""

import argparse
import math
import pydoc_data.topics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from app.models import quantized_copy
from app.models.quantized_copy import save_quantized
from app.progress import SilentProgress
from app.text.gguf_tokenizer import from_gguf
from engine.calibration import input_squares
from engine.loading import open_checkpoint
from quant.checkpoint_files import read_object
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize
from quant.layer_format import NOT_QUANTIZED, is_quantized, read_format
from quant.quantized_storage import SECTION, Method
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import decode_plain
from tests.support.float32_smollm2 import transformers_model

TOKENS, WINDOW, START = 4096, 1024, 20_000
MEASURED = "INT4, groups of 64, measured"
METHODS = {
    "FP8": Method("fp8"),
    "INT4, groups of 64": Method("int4", 64),
    MEASURED: Method("int4", 64),
    "INT4, groups of 32": Method("int4", 32),
    "NF4": Method("nf4"),
    "NF4, scales quantized": Method("nf4", nested=True),
}


def text_ids(model: Path, book: Path | None) -> list[int]:
    text = book.read_text()[START:] if book else "\n\n".join(pydoc_data.topics.topics.values())
    with GGUFFile(model) as file:
        return list(from_gguf(file.metadata).encode(text[: 8 * TOKENS]))[:TOKENS]


def measure(model: Path, original: Path) -> dict[str, Tensor]:
    """Return the mean squares of inputs that `ingle quantize` would measure for a folder with a vocabulary."""
    with GGUFFile(model) as file, open_checkpoint(original) as checkpoint:
        return input_squares(checkpoint, quantized_copy.text_ids(from_gguf(file.metadata)), lambda _done: None)


def losses(model: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    """Return the negative log-likelihoods of all tokens but the first of each window, as float64."""
    found = []
    with torch.inference_mode():
        for window in torch.split(torch.tensor(ids), WINDOW):
            logits = model(window.unsqueeze(0)).logits[0, :-1]
            found.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(found).double()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint as float32, read by Inglenook's decoders."""
    section = (read_object(folder, "config.json") or {}).get(SECTION)
    decode = (NOT_QUANTIZED if section is None else read_format(section)).decode
    weights = {}
    with SafetensorsShards(folder) as checkpoint:
        layers: Mapping[str, dict[str, str]] = defaultdict(dict)
        for name in checkpoint.tensors:
            layer = name.partition(".weight")[0]
            layers[layer][name.removeprefix(f"{layer}.")] = name
        for layer, names in layers.items():
            if is_quantized({rest: checkpoint.tensors[name] for rest, name in names.items()}):
                weights[f"{layer}.weight"] = dequantize(decode(checkpoint, layer, names))
            else:
                name = names["weight"]
                weights[name] = dequantize(decode_plain(checkpoint.tensors[name], checkpoint.data(name)))
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="a text file (default: the text of Python's help() topics)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in `ingle quantize`; more threads would wait for each other on a busy machine
    model, ids = transformers_model(arguments.model, tied=False), text_ids(arguments.model, arguments.text)
    exact = losses(model, ids)
    print(f"{len(ids)} tokens\n\n| float32 | {math.exp(exact.mean()):.4f} |", flush=True)

    def print_row(name: str, folder: Path, rest: str) -> None:
        model.load_state_dict(read_weights(folder))
        more = losses(model, ids) - exact
        mean, error = more.mean().item(), more.std().item() / math.sqrt(len(more))
        found = math.exp(exact.mean() + mean)
        print(f"| {name} | {found:.4f} | {math.expm1(mean):+.2%} | {mean:+.4f} ({error:.4f}) | {rest} |", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "bf16"
        model.bfloat16().save_pretrained(original)
        torch.nn.Module.float(model)
        print_row("bfloat16", original, "16 | ")
        elements = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("proj.weight"))
        for name, method in METHODS.items():
            folder = Path(scratch) / name
            start = time.perf_counter()
            measured = partial(measure, arguments.model, original) if name == MEASURED else dict
            copy = save_quantized(original, folder, method, SilentProgress(), measure=measured)
            seconds = time.perf_counter() - start
            bits = 16 - 8 * (copy.original_bytes - stored_bytes(folder)) / elements
            print_row(name, folder, f"{bits:.3f} | {elements / seconds / 1e6:.0f}")


def stored_bytes(folder: Path) -> int:
    with SafetensorsShards(folder) as checkpoint:
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


if __name__ == "__main__":
    main()
