"""SmolLM2-135M in transformers, with the weights of a GGUF file that the `gguf` package dequantizes to float32."""

from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from tests.support.gguf_reader import Reader


def transformers_model(path: Path, *, tied: bool) -> LlamaForCausalLM:
    """Load the model. If `tied` is set, the head shares the embedding's memory, else it is a copy."""
    reader = Reader(path)
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
        tie_word_embeddings=tied,
    )
    with no_init_weights():  # skip the initialization, because all weights are overwritten
        model: LlamaForCausalLM = LlamaForCausalLM(config).train(mode=False)
    model.tie_weights()
    model.load_state_dict(_renamed(values), strict=not tied)
    return model


def _renamed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    out = {
        "model.embed_tokens.weight": values["token_embd.weight"],
        "lm_head.weight": values["token_embd.weight"],
        "model.norm.weight": values["output_norm.weight"],
    }
    for name, value in values.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            heads = {"attn_q": 9, "attn_k": 3}.get(part)
            # GGUF stores the two rows of a rotary pair side by side; transformers stores them half a head apart.
            halves = value.view(heads, -1, 2, 576).transpose(1, 2).reshape(value.shape) if heads else value
            out[f"model.layers.{layer}.{parts[part]}.weight"] = halves
    return out
