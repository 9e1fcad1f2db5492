"""The dense Granite family: Llama's layers with four multipliers (`granite` in transformers).

Granite 3's model cards describe the multipliers. In GGUF files rotary pairs are adjacent elements, as for Llama.
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.metadata import Key, Metadata
from engine.config import ModelConfig
from engine.models.decoder_config import NAMES, read_decoder

__all__ = ["NAMES", "read_config"]

DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_multiplier": 1.0}
EMBEDDING = Key(Keys.LLM.EMBEDDING_SCALE, "embedding_multiplier")
RESIDUAL = Key(Keys.LLM.RESIDUAL_SCALE, "residual_multiplier")
ATTENTION = Key(Keys.Attention.SCALE, "attention_multiplier")
LOGITS = Key(Keys.LLM.LOGIT_SCALE, "logits_scaling")  # divisor of the logits
FINETUNED = Key(Keys.Rope.SCALING_FINETUNED, "")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    metadata.require(FINETUNED, True)
    config = read_decoder(metadata, interleaved=True)
    embedding, residual, logits = (
        metadata.number(key, 1.0, minimum=1e-4, maximum=1e4) for key in (EMBEDDING, RESIDUAL, LOGITS)
    )
    # The model multiplies everything that is added to the residual stream by `residual`. Here the stream is scaled by 1
    # / residual instead, and epsilons by 1 / residual**2. This is equivalent, because only norms read the stream, and
    # their results do not depend on its scale.
    return replace(
        config,
        embedding_scale=embedding / residual,
        norm=replace(config.norm, epsilon=config.norm.epsilon / residual**2),
        logit_scale=1 / logits,
        attention_scale=metadata.number(ATTENTION, config.head_dim**-0.5, minimum=1e-6, maximum=1e3),
    )
