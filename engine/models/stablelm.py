"""The StableLM family: Llama's layers, but norms subtract the mean and have a bias, a part of each head turns, and
StableLM 2 12B computes attention and MLP side by side (arXiv:2402.17834; `stablelm` in transformers).

Only GGUF files may have normalized heads: checkpoints of transformers store a tensor for each head.
"""

from dataclasses import replace

from engine.checkpoints.metadata import Key, Metadata
from engine.config import Block, HeadNorm, ModelConfig, NormKind
from engine.models.decoder_config import NAMES, read_decoder

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 32,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
}
QKV_BIAS = Key("", "use_qkv_bias")
PARALLEL = Key("", "use_parallel_residual")  # GGUF files have the key, but only their tensors tell
HEAD_NORMS = Key("", "qk_layernorm")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    metadata.refuse(HEAD_NORMS, False)
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
