"""What checkpoints of transformers call the weights of a decoder, for the families to start from. Imports no torch."""

import re

from engine.checkpoints.checkpoint import Names

STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
IGNORED = re.compile(  # what old checkpoints repeat of their configuration, and what sees images for the decoder
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..+"
)
TEXT_PREFIX = "language_model."  # somewhere in the names of a decoder that is a part of a larger model
NAMES = Names(STEMS, IGNORED)
