"""Cohere's Command-R: attention and MLP in parallel with one norm, which subtracts the mean (`cohere` in transformers).

Some models normalize heads, each head with its own weights. GGUF files have architecture `command-r`. Rotary pairs are
adjacent elements in both formats.
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import Block, HeadNorm, ModelConfig, NormKind
from engine.models.decoder_config import NAMES, read_decoder
from engine.models.rope_config import CONTEXT, MAX_CONTEXT

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
LOGIT_SCALE = Key(Keys.LLM.LOGIT_SCALE, "logit_scale")
HEAD_NORMS = Key("", "use_qk_norm")
# the full context length; takes precedence over max_position_embeddings, which may be smaller
LONG_CONTEXT = Key("", "model_max_length")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    config = read_decoder(metadata, norm=NormKind.LAYER)
    (rope,) = config.ropes
    return replace(
        config,
        context_length=metadata.integer(
            LONG_CONTEXT, metadata.integer(CONTEXT, maximum=MAX_CONTEXT), maximum=MAX_CONTEXT
        ),
        ropes=(replace(rope, interleaved=True),),
        block=Block.PARALLEL_ONE_NORM,
        head_norm=HeadNorm.OWN if metadata.flag(HEAD_NORMS, not metadata.is_config) else None,
        optional_head_norm=not metadata.is_config,
        logit_scale=metadata.number(LOGIT_SCALE, minimum=1e-6, maximum=1e6),
    )
