"""What quantizing costs in perplexity: `python -m tests.perplexity MODEL.gguf`, of SmolLM2-135M-Instruct.

The file's weights as float32, rounded to bfloat16 in a checkpoint of Hugging Face's names, and that checkpoint after
`ingle quantize` by every method, read back from its files by our decoders; always computed by transformers in float32.
The text is the reference of Python's help(), which comes with Python: 4,096 tokens, in windows of 1,024. Printed: the
perplexity of each, next to float32's, bits a weight of the linear layers, and how fast one thread quantizes and writes.

The file's weights lie on grids of 16 numbers. Rounded to another grid of 16, all weights of a group err alike, two to
four times as much on average over a group as those of a model that was never quantized. So each column is scaled by a
random factor first, from 0.8 to 1.3, and what it is multiplied by is divided by it: the model computes the same, of
weights that lie on no grid. With --as-it-is, it is not.
"""

import argparse
import math
import platform
import pydoc_data.topics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from app.models.quantized_copy import save_quantized
from app.progress import SilentProgress
from app.text.gguf_tokenizer import from_gguf
from quant.checkpoint_files import read_object
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize
from quant.layer_format import NOT_QUANTIZED, is_quantized, read_format
from quant.quantized_storage import SECTION, Method
from quant.safetensors_checkpoint import SafetensorsCheckpoint
from quant.safetensors_values import decode_plain
from tests.engine.test_smollm2 import renamed

TOKENS, WINDOW = 4096, 1024
METHODS = {
    "FP8": Method("fp8"),
    "INT4, groups of 64": Method("int4", 64),
    "NF4": Method("nf4"),
    "NF4, scales quantized": Method("nf4", nested=True),
}


def load(path: Path) -> LlamaForCausalLM:
    """The file's weights as float32."""
    reader = gguf.GGUFReader(path)
    values = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=float(reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()),
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=False,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).train(mode=False)
    model.load_state_dict(renamed(values))
    return model


def rescale(model: LlamaForCausalLM) -> None:
    """What writes a number multiplies it, and what reads it divides by the same: norms, values, and the inner MLP."""
    generator = torch.Generator().manual_seed(0)

    def factors(count: int) -> Tensor:
        return torch.empty(count).uniform_(-0.25, 0.25, generator=generator).exp()

    with torch.inference_mode():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                scale = factors(576)
                norm.weight /= scale
                for reader in readers:
                    reader.weight *= scale
            scale = factors(1536)
            mlp.up_proj.weight *= scale.unsqueeze(-1)
            mlp.down_proj.weight /= scale
            scale = factors(192)
            attention.v_proj.weight *= scale.unsqueeze(-1)
            attention.o_proj.weight /= scale.view(3, 1, 64).expand(3, 3, 64).flatten()  # three heads read each


def text_ids(path: Path) -> list[int]:
    text = "\n\n".join(pydoc_data.topics.topics.values())
    with GGUFFile(path) as file:
        return list(from_gguf(file.metadata).encode(text[: 8 * TOKENS]))[:TOKENS]


def perplexity(model: LlamaForCausalLM, ids: Sequence[int]) -> float:
    """Over every token but the first of each window."""
    losses = []
    with torch.inference_mode():
        for window in torch.split(torch.tensor(ids), WINDOW):
            logits = model(window.unsqueeze(0)).logits[0, :-1]
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return math.exp(torch.cat(losses).double().mean().item())


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint as float32, by our decoders."""
    section = (read_object(folder, "config.json") or {}).get(SECTION)
    decode = (NOT_QUANTIZED if section is None else read_format(section)).decode
    weights = {}
    with SafetensorsCheckpoint(folder) as checkpoint:
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
    parser.add_argument("--as-it-is", action="store_true", help="do not scale columns")
    arguments = parser.parse_args()
    path: Path = arguments.model
    torch.set_num_threads(1)  # as the command does; and on a busy machine its threads wait for each other
    model, ids = load(path), text_ids(path)
    exact = perplexity(model, ids)
    if not arguments.as_it_is:
        rescale(model)
        print(f"columns scaled: {perplexity(model, ids) / exact - 1:+.1e}")
    print(f"Python {platform.python_version()}, {len(ids)} tokens\n\n| float32 | {exact:.4f} | | | |", flush=True)

    def tell(name: str, folder: Path, rest: str) -> None:
        model.load_state_dict(read(folder))
        found = perplexity(model, ids)
        print(f"| {name} | {found:.4f} | {found / exact - 1:+.2%} | {rest} |", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "bf16"
        model.bfloat16().save_pretrained(original)
        torch.nn.Module.float(model)
        tell("bfloat16", original, "16 | ")
        elements = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("proj.weight"))
        for name, method in METHODS.items():
            folder = Path(scratch) / name
            start = time.perf_counter()
            copy = save_quantized(original, folder, method, SilentProgress())
            seconds = time.perf_counter() - start
            bits = 16 - 8 * (copy.original_bytes - stored_bytes(folder)) / elements
            tell(name, folder, f"{bits:.3f} | {elements / seconds / 1e6:.0f}")


def stored_bytes(folder: Path) -> int:
    with SafetensorsCheckpoint(folder) as checkpoint:
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


if __name__ == "__main__":
    main()
