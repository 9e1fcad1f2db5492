"""Tiny random Llama checkpoints: a transformers model, and the converted GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# GGML types of the matrices in a file, by tensor name within a layer. All others are F32. Every mix has matrices that
# the CPU kernels join (q with k, gate with up), and some that they must keep separate.
MIXES: dict[str, dict[str, str]] = {
    "Q4_0": dict.fromkeys(MATRICES, "Q4_0"),
    "Q4_1": dict.fromkeys(MATRICES, "Q4_1") | {"token_embd": "Q8_0"},
    "Q8_0": dict.fromkeys(MATRICES, "Q8_0") | {"attn_v": "Q4_0"},
    "F16": dict.fromkeys(MATRICES, "F16") | {"ffn_gate": "BF16", "attn_k": "Q8_0", "output": "Q4_1"},
    "every type": {
        "attn_q": "Q4_1", "attn_k": "Q8_0", "attn_v": "F16", "attn_output": "Q4_0", "ffn_gate": "Q8_0",
        "ffn_up": "Q4_1", "ffn_down": "BF16", "token_embd": "Q4_0",
    },
}  # fmt: skip


@dataclass(frozen=True)
class TinyLlama:
    """A transformers model and the same weights in a GGUF file, which may be quantized."""

    reference: LlamaForCausalLM
    path: Path


def make(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int | None = None,
    mlp: int = 96,
    vocab: int = 97,
    types: Mapping[str, str] | None = None,
    tied: bool = False,
    rope: Mapping[str, object] | None = None,
    rope_factors: Tensor | None = None,
    linear_factor: float | None = None,
    layers: int = 3,
    seed: int = 0,
) -> TinyLlama:
    """Make a model of a few layers. Its weights are large enough that replies vary. `types`: an entry as in MIXES."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden or heads * 16,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope or {"rope_type": "default", "rope_theta": 10000.0}),
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).train(mode=False)
    path = folder / "tiny.gguf"
    _write(path, model, (heads, kv_heads, head_dim), types or {}, rope_factors, linear_factor)
    return TinyLlama(model, path)


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a q or k projection, so that rotary pairs are adjacent instead of half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _write(
    path: Path,
    model: LlamaForCausalLM,
    shape: tuple[int, int, int],
    types: Mapping[str, str],
    factors: Tensor | None,
    linear: float | None,
) -> None:
    config, (query_heads, kv_heads, head_dim) = model.config, shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(query_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if linear is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    state = model.state_dict()

    def add(name: str, values: Tensor) -> None:
        kind = gguf.GGMLQuantizationType[types.get(name.split(".")[-2], "F32")]
        writer.add_tensor(name, gguf.quantize(values.contiguous().numpy(), kind), raw_dtype=kind)

    for number in range(config.num_hidden_layers):
        prefix, out = f"model.layers.{number}.", f"blk.{number}."
        for theirs, ours in NAMES.items():
            add(f"{out}{ours}.weight", state[f"{prefix}{theirs}.weight"])
        for letter, heads in (("q", query_heads), ("k", kv_heads)):
            add(f"{out}attn_{letter}.weight", _interleave(state[f"{prefix}self_attn.{letter}_proj.weight"], heads))
    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", state["lm_head.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
