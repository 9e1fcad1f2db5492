"""The Mistral families: Llama's layers, some with windows (arXiv:2310.06825), and a YaRN-scaled rope in Ministral 3.

Architectures in a config.json: `mistral`, `ministral`, and `ministral3`; `mistral3` is a multimodal model with one of
them as its decoder. In GGUF files: `mistral3`, with adjacent rotary pairs, and `llama` for earlier models.
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import ModelConfig, YarnScaling
from engine.models.decoder_config import (
    IGNORED,
    STEMS,
    TEXT_PREFIX,
    all_but_every,
    read_decoder,
    text_metadata,
    with_windows,
)

NAMES = Names(STEMS, IGNORED, TEXT_PREFIX)

SHARED: dict[str, object] = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
MISTRAL = SHARED | {"rms_norm_eps": 1e-6, "sliding_window": 4096}
MINISTRAL3 = SHARED | {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
DEFAULTS: dict[str, dict[str, object]] = {
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "ministral3": MINISTRAL3,
    "mistral3": {},
}
TEMPERATURE = Key(Keys.Attention.TEMPERATURE_SCALE, "rope_parameters.llama_4_scaling_beta")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = text_metadata(metadata, DEFAULTS)
    config = read_decoder(metadata, interleaved=True)
    config = replace(config, context_length=_context(metadata, config))
    return with_windows(metadata, config, all_but_every(0, len(config.layers)))


def _context(metadata: Metadata, config: ModelConfig) -> int:
    """Return the context length, limited to positions at which queries are not scaled.

    After the original context, some models multiply queries by a factor that grows with the position. This is not
    supported, so the context is limited.
    """
    scaling = config.ropes[0].scaling
    if metadata.number(TEMPERATURE, 0.0, minimum=0.0, maximum=10.0) and isinstance(scaling, YarnScaling):
        return min(config.context_length, scaling.original_context)
    return config.context_length
