"""The Phi-3 family: fused q, k, v and gate, up matrices, and in some models partial rotary embedding
(arXiv:2404.14219).

Architecture `phi3`: Phi-3, 3.5, and 4, and Phi-4-mini. In GGUF files the factors of LongRoPE are tensors.
"""

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Metadata
from engine.model_config import ModelConfig
from engine.models.decoder_config import IGNORED, STEMS, all_but_every, read_decoder, with_windows
from engine.models.rope_config import LONG_ATTENTION, TYPE

NAMES = Names(
    STEMS
    | {
        "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
        "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
    },
    IGNORED,
)
DEFAULTS: dict[str, object] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    if metadata.get(LONG_ATTENTION) is not None:  # in most GGUF files, only this key indicates LongRoPE
        metadata = metadata.with_defaults({metadata.name(TYPE): "longrope"})
    config = read_decoder(metadata, partial_rotary=True)
    return with_windows(metadata, config, all_but_every(0, len(config.layers)))
