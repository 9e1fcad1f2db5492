"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv:2307.09288, arXiv:2407.21783).

GGUF files and checkpoints of architecture `llama`: Llama 2 and 3, SmolLM2, Mistral 7B, TinyLlama, Yi, distills of that
shape. In GGUF files their rotary pairs are neighbours: the converter reorders the rows of q and k.
"""

from engine.checkpoint_config import Key, Metadata
from engine.config import ModelConfig
from engine.models.decoder import NAMES, Decoder
from engine.models.decoder_config import read_decoder

__all__ = ["NAMES", "Decoder", "read_config"]


def read_config(metadata: Metadata) -> ModelConfig:
    """What is absent has the default that the format gives it."""
    metadata.refuse(Key("", "mlp_bias"), False)
    metadata.refuse(Key("", "hidden_act"), "silu")
    return read_decoder(metadata, interleaved=True)
