"""Tiny random Llama checkpoints: a transformers model, and the GGUF file a converter would make of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyLlama:
    """The same weights twice."""

    reference: LlamaForCausalLM
    path: Path


def make(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    rope: Mapping[str, object] | None = None,
    rope_factors: Tensor | None = None,
    linear_factor: float | None = None,
    seed: int = 0,
) -> TinyLlama:
    """A model of 3 layers with a vocabulary of 97, weights large enough for its choices to differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=heads * 16,
        intermediate_size=96,
        num_hidden_layers=3,
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
    _write(path, model, (heads, kv_heads, head_dim), rope_factors, linear_factor)
    return TinyLlama(model, path)


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection, from pairs half a head apart to neighbouring pairs."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _write(
    path: Path, model: LlamaForCausalLM, shape: tuple[int, int, int], factors: Tensor | None, linear: float | None
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
    for number in range(config.num_hidden_layers):
        prefix, out = f"model.layers.{number}.", f"blk.{number}."
        for theirs, ours in NAMES.items():
            writer.add_tensor(f"{out}{ours}.weight", state[f"{prefix}{theirs}.weight"].numpy())
        for letter, heads in (("q", query_heads), ("k", kv_heads)):
            weight = _interleave(state[f"{prefix}self_attn.{letter}_proj.weight"], heads)
            writer.add_tensor(f"{out}attn_{letter}.weight", weight.contiguous().numpy())
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
