"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv:2307.09288, arXiv:2407.21783).

Covers architecture `llama` in GGUF files and transformers checkpoints: Llama 2 and 3, SmolLM2, Mistral 7B, TinyLlama,
Yi, and distilled models with that architecture. In GGUF files rotary pairs are adjacent elements, because the converter
reorders the rows of q and k.
"""

from engine.checkpoints.metadata import Metadata
from engine.config import ModelConfig
from engine.models.decoder_config import NAMES, read_decoder

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def read_config(metadata: Metadata) -> ModelConfig:
    """Return the configuration. Missing values get the defaults of transformers."""
    return read_decoder(metadata.with_defaults(DEFAULTS), interleaved=True)
