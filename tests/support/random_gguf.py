"""Write GGUF files of the shape of Llama, Qwen3 MoE, Qwen3.5, gpt-oss, or Gemma 4 with random weights of any type, as
large as real models.

    python -m tests.support.random_gguf --help

Nothing is quantized: a block is random bytes with realistic scales. The output of such a model has no meaning, but it
takes the memory and time of a real one, and its activations have realistic magnitudes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.gemma4_shape import MATRIX, Gemma4Shape
from tests.support.weight_mixes import Q4_K_M, kind_in_mix

Bytes = NDArray[np.uint8]

DEVIATION = 0.02  # standard deviation of a weight
INTERVAL = 4  # of layers with attention, if the others have delta rules
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PIECE = 1 << 20  # number of blocks that are made at a time, which limits the memory


@dataclass(frozen=True)
class DeltaShape:
    """The gated delta rules of all layers except every fourth."""

    key_heads: int
    value_heads: int
    dim: int = 128  # of keys and of values
    taps: int = 4

    @property
    def width(self) -> int:
        return self.value_heads * self.dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_heads * self.dim + self.width


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama, of a Qwen3 MoE if it has experts, of a Qwen3.5 if it has delta rules, or of gpt-oss.

    Widths are multiples of 256, so that every type can store every matrix; those of gpt-oss are multiples of 32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    vocabulary: int
    context: int = 2048
    experts: int = 0  # each of width `mlp_hidden`
    active: int = 0  # number of experts chosen for a token
    shared: int = 0  # width of the expert that all tokens use
    delta: DeltaShape | None = None
    window: int = 0  # of every other layer of gpt-oss; 0: another family

    @property
    def architecture(self) -> str:
        if self.window:
            return "gpt-oss"
        if self.delta:
            return "qwen35moe" if self.experts else "qwen35"
        return "qwen3moe" if self.experts else "llama"


GEMMA4_SIZES = {
    "gemma4-e2b": Gemma4Shape(35, 1536, 8, 1, 6144, shared=20, interval=5, wide=True),
    "gemma4-e4b": Gemma4Shape(42, 2560, 8, 2, 10_240, shared=18, interval=6, wide=False),
}
SIZES = {
    "1.1b": Shape(22, 2048, 32, 4, 64, 5632, 32_000),  # the shape of TinyLlama
    # the shape of Qwen3-30B-A3B, which has 48 layers
    "30b-a3b": Shape(12, 2048, 32, 4, 128, 768, 151_936, 8192, experts=128, active=8),
    # the shape of Qwen3.5-4B, which has 32 layers
    "qwen3.5-4b": Shape(16, 2560, 16, 4, 256, 9216, 151_936, 8192, delta=DeltaShape(16, 32)),
    # the shape of Qwen3.8-27B, which has 64 layers
    "27b": Shape(16, 5120, 24, 4, 256, 17_408, 151_936, 8192, delta=DeltaShape(16, 48)),
    # the shape of Qwen3.6-35B-A3B, which has 40 layers
    "35b-a3b": Shape(12, 2048, 16, 2, 256, 512, 151_936, 8192, 256, 8, 512, DeltaShape(16, 32)),
    # the states and the keys and values of Qwen3.5-35B-A3B: 63 MiB, and 20 KiB per token
    "states-of-35b-a3b": Shape(40, 256, 8, 2, 256, 512, 2048, 65_536, delta=DeltaShape(16, 32)),
    # the shape of gpt-oss-20b
    "gpt-oss-20b": Shape(24, 2880, 64, 8, 64, 2880, 201_088, 8192, experts=32, active=4, window=128),
    "tiny": Shape(4, 256, 4, 2, 64, 512, 512),
}


@dataclass(frozen=True)
class Scales:
    """The float16 scales of a block. `halves` maps byte offsets to multiples of one random number."""

    deviation: float  # standard deviation of the values if the random number is 1
    halves: dict[int, float]


# The deviations are those of uniform codes and uniform scales in a block. The multiple of the minimum makes the mean 0.
SCALES = {
    "Q4_0": Scales(4.6, {0: 1}),
    "Q4_1": Scales(4.6, {0: 1, 2: -7.5}),
    "Q5_0": Scales(9.2, {0: 1}),
    "Q5_1": Scales(9.2, {0: 1, 2: -15.5}),
    "Q8_0": Scales(74, {0: 1}),
    "Q2_K": Scales(14, {80: 1, 82: 1.5}),
    "Q3_K": Scales(43, {108: 1}),
    "Q4_K": Scales(260, {0: 1, 2: 7.5}),
    "Q5_K": Scales(520, {0: 1, 2: 15.5}),
    "Q6_K": Scales(1370, {208: 1}),
    "IQ4_NL": Scales(70, {0: 1}),
    "IQ4_XS": Scales(1290, {0: 1}),
    "TQ1_0": Scales(0.8, {52: 1}),
    "TQ2_0": Scales(1.2, {64: 1}),
}
MXFP4_EXPONENTS = (118, 120)  # range of the scale byte: four-bit values are multiplied by 2 ** -10 to 2 ** -8
PLAIN = ("F32", "F16", "BF16")
TYPES = (*SCALES, "MXFP4", *PLAIN)
GPT_OSS = "GPT-OSS"  # the mix of types in its files


def random_blocks(kind: str, count: int, rng: np.random.Generator) -> Bytes:
    """Return `count` random blocks, [count, bytes per block]. Values have about DEVIATION and a mean near 0."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind in PLAIN:
        values = rng.standard_normal(count * elements, np.float32) * np.float32(DEVIATION)
        if kind == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(count, size)
        return values.view(np.uint8).reshape(count, 4)[:, 4 - size :]  # bfloat16 is the upper half of float32
    blocks = np.frombuffer(bytearray(rng.bytes(count * size)), np.uint8).reshape(count, size)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(*MXFP4_EXPONENTS, count, np.uint8, endpoint=True)
        return blocks
    scales = SCALES[kind]
    unit = rng.uniform(0.7, 1.3, count) * (DEVIATION / scales.deviation)
    if len(scales.halves) == 1:
        # scales of real files also have both signs; without a minimum, the mean of the codes is not 0
        unit *= rng.choice((-1, 1), count)
    for at, factor in scales.halves.items():
        blocks[:, at : at + 2] = (unit * factor).astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def tensors(shape: Shape | Gemma4Shape, mix: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the name, shape, and type of every tensor.

    `mix` is one type, several types to use in turn, Q4_K_M, or GPT_OSS: MXFP4 experts, and Q8_0 for other matrices.
    """
    kinds = cycle(mix.split())
    if isinstance(shape, Gemma4Shape):
        for stored, extents, given in shape.tensors():
            stem = stored.removesuffix(".weight")
            of_mix = "Q6_K" if stem.endswith("token_embd") else kind_in_mix(stem, shape.layers)
            yield stored, extents, given if given != MATRIX else of_mix if mix == Q4_K_M else next(kinds)
        return

    def matrix(name: str, rows: int, columns: int) -> tuple[str, tuple[int, ...], str]:
        if mix == GPT_OSS:
            kind = "MXFP4" if "ffn_" in name else "Q8_0"
        else:
            kind = kind_in_mix(name, shape.layers) if mix == Q4_K_M else next(kinds)
        return f"{name}.weight", (rows, columns), kind

    def experts(name: str, rows: int, columns: int) -> tuple[str, tuple[int, ...], str]:
        stored, extents, kind = matrix(name, rows, columns)
        return stored.replace(".weight", "_exps.weight"), (shape.experts, *extents), kind

    hidden, mlp, kv = shape.hidden, shape.mlp_hidden, shape.kv_heads * shape.head_dim
    q = shape.heads * shape.head_dim
    yield matrix("token_embd", shape.vocabulary, hidden)
    for number in range(shape.layers):
        layer = f"blk.{number}."
        yield f"{layer}attn_norm.weight", (hidden,), "F32"
        if shape.delta and (number + 1) % INTERVAL:
            delta = shape.delta
            yield matrix(f"{layer}attn_qkv", delta.conv_width, hidden)
            yield matrix(f"{layer}attn_gate", delta.width, hidden)
            yield from ((f"{layer}ssm_{it}.weight", (delta.value_heads, hidden), "F32") for it in ("beta", "alpha"))
            yield f"{layer}ssm_conv1d.weight", (delta.conv_width, delta.taps), "F32"
            yield from ((f"{layer}{it}", (delta.value_heads,), "F32") for it in ("ssm_dt.bias", "ssm_a"))
            yield f"{layer}ssm_norm.weight", (delta.dim,), "F32"
            yield matrix(f"{layer}ssm_out", hidden, delta.width)
        else:
            yield matrix(f"{layer}attn_q", 2 * q if shape.delta else q, hidden)
            yield matrix(f"{layer}attn_k", kv, hidden)
            yield matrix(f"{layer}attn_v", kv, hidden)
            yield matrix(f"{layer}attn_output", hidden, q)
            if shape.window:
                biased = {"q": q, "k": kv, "v": kv, "output": hidden}
                yield from ((f"{layer}attn_{it}.bias", (width,), "F32") for it, width in biased.items())
                yield f"{layer}attn_sinks.weight", (shape.heads,), "F32"
            elif shape.experts or shape.delta:
                yield from ((f"{layer}attn_{letter}_norm.weight", (shape.head_dim,), "F32") for letter in "qk")
        yield f"{layer}{'post_attention_norm' if shape.delta or shape.window else 'ffn_norm'}.weight", (hidden,), "F32"
        if shape.experts:
            yield f"{layer}ffn_gate_inp.weight", (shape.experts, hidden), "F32"
        if shape.shared:
            yield f"{layer}ffn_gate_inp_shexp.weight", (hidden,), "F32"
            yield matrix(f"{layer}ffn_gate_shexp", shape.shared, hidden)
            yield matrix(f"{layer}ffn_up_shexp", shape.shared, hidden)
            yield matrix(f"{layer}ffn_down_shexp", hidden, shape.shared)
        if shape.window:
            widths = {"gate_inp": (shape.experts,), "gate_exps": (shape.experts, mlp), "up_exps": (shape.experts, mlp)}
            widths["down_exps"] = (shape.experts, hidden)
            yield from ((f"{layer}ffn_{it}.bias", extents, "F32") for it, extents in widths.items())
        mlp_matrix = experts if shape.experts else matrix
        yield mlp_matrix(f"{layer}ffn_gate", mlp, hidden)
        yield mlp_matrix(f"{layer}ffn_up", mlp, hidden)
        yield mlp_matrix(f"{layer}ffn_down", hidden, mlp)
    yield "output_norm.weight", (hidden,), "F32"
    yield matrix("output", shape.vocabulary, hidden)


def write(path: Path, mix: str, shape: Shape | Gemma4Shape, seed: int = 0) -> None:
    """Write a model file, one piece of a tensor at a time."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    if isinstance(shape, Gemma4Shape):
        shape.add_metadata(writer)
    else:
        _add_metadata(writer, shape)
    _add_vocabulary(writer, shape.vocabulary)
    listed = list(tensors(shape, mix))
    for name, extents, kind in listed:
        row = gguf.quant_shape_to_byte_shape(extents, gguf.GGMLQuantizationType[kind])
        writer.add_tensor_info(name, row, np.dtype(np.uint8), int(np.prod(row)), gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = np.random.default_rng(seed)
    with path.open("r+b") as file:
        file.seek(0, 2)
        for name, extents, kind in listed:
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            left = int(np.prod(extents)) // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            if name == "rope_freqs.weight":
                file.write(np.where(np.arange(left) < left // 4, 1.0, 1e30).astype("<f4").tobytes())
                continue
            if name.endswith(("norm.weight", "scale.weight", "ssm_a")):
                values = rng.normal(1, 0.1, left) * (-1 if name.endswith("ssm_a") else 1)  # the rate of decay
                file.write(values.astype("<f4").tobytes())
                continue
            while left:
                count = min(left, PIECE)
                file.write(random_blocks(kind, count, rng).tobytes())
                left -= count
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("Random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp_hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.delta else shape.head_dim)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_feed_forward_length(shape.mlp_hidden)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.shared:
        writer.add_expert_shared_feed_forward_length(shape.shared)
    if shape.delta:
        writer.add_full_attention_interval(INTERVAL)
        writer.add_ssm_conv_kernel(shape.delta.taps)
        writer.add_ssm_state_size(shape.delta.dim)
        writer.add_ssm_group_count(shape.delta.key_heads)
        writer.add_ssm_time_step_rank(shape.delta.value_heads)
        writer.add_ssm_inner_size(shape.delta.width)
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a byte-level vocabulary of `size` tokens: all bytes, pairs of bytes, unused tokens, and CONTROL_TOKENS."""
    alphabet = sorted(ByteLevel.alphabet())
    normal = size - len(CONTROL_TOKENS)
    pairs = list(islice(((a, b) for a in alphabet for b in alphabet), normal - len(alphabet)))
    unused = (f"<|unused {number}|>" for number in range(normal - len(alphabet) - len(pairs)))
    tokens = [*alphabet, *(a + b for a, b in pairs), *unused, *CONTROL_TOKENS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * normal + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file of random weights.")
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    choices = [Q4_K_M, GPT_OSS, *TYPES]
    parser.add_argument("--mix", type=str.upper, choices=choices, default=Q4_K_M, help="type of the matrices")
    parser.add_argument("--size", choices=sorted(SIZES | GEMMA4_SIZES), default="1.1b")
    parser.add_argument("--layers", type=int, help="number of layers, instead of that of the size")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shape = (SIZES | GEMMA4_SIZES)[given.size]
    write(given.path, given.mix, replace(shape, layers=given.layers or shape.layers), given.seed)


if __name__ == "__main__":
    main()
