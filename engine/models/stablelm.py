"""The StableLM family: Llama's layers, with layer norms that have a bias, and partial rotary embedding.

StableLM 2 12B computes attention and MLP in parallel (arXiv:2402.17834; `stablelm` in transformers). Head norms are
supported in GGUF files only: transformers checkpoints store a tensor per head.
"""

from dataclasses import replace

from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import Block, HeadNorm, ModelConfig, NormKind
from engine.models.decoder_config import NAMES, read_decoder

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 32,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
}
QKV_BIAS = Key("", "use_qkv_bias")
# GGUF files also have this key, but it is unreliable there, so the norms in the file decide
PARALLEL = Key("", "use_parallel_residual")
HEAD_NORMS = Key("", "qk_layernorm")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    metadata.require(HEAD_NORMS, False)
    config = read_decoder(metadata, norm=NormKind.LAYER, partial_rotary=True)
    config = replace(config, norm=replace(config.norm, bias=True))
    if not metadata.is_config:
        return replace(config, block=None, head_norm=HeadNorm.OWN, optional_head_norm=True)
    return replace(
        config,
        block=Block.PARALLEL_ONE_NORM if metadata.flag(PARALLEL, False) else Block.SEQUENTIAL,
        qkv_bias=metadata.flag(QKV_BIAS, False),
        out_bias=False,
    )
